# SPDX-License-Identifier: Apache-2.0
"""Execution traces in MLCommons' Chakra format: for each rank, a graph of a simulated step for other simulators.

A file is a sequence of protobuf messages, each preceded by its length: one GlobalMetadata, then a Node for each task.

    COMP_NODE          computation, with its seconds
    COMM_COLL_NODE     an operation: its kind, the bytes that this rank sends, and the name of its group of ranks

A node depends on what must end before it begins: the task before it, operations that its rank waits for, the operation
before it in its channel, and the operation that it must follow. This module writes and reads the few fields in use
without the protobuf library.

Source of the field numbers: github.com/mlcommons/chakra, schema/protobuf/et_def.proto.
"""

import json
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds_hybridep.errors import ConfigError
from ds_hybridep.simulate.events import Operation, Post, Run, Span
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.simulator import SimulatedStep
from ds_hybridep.simulate.traffic import Ranks

SCHEMA_VERSION = "0.0.4"
COMP_NODE, COMM_COLL_NODE = 4, 7
ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER = 0, 2, 6, 7
KINDS = {
    "tokens": ALL_TO_ALL,
    "weights": ALL_GATHER,
    "gather": ALL_GATHER,
    "gradients": REDUCE_SCATTER,
    "sync": ALL_REDUCE,
}
SECONDS = "seconds"  # our attribute: duration_micros has whole microseconds only
MICRO = 1e6

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
# Field numbers of Node, and of the value types of AttributeProto that this module uses.
ID, NAME, TYPE, DATA_DEPS, START, DURATION, ATTRIBUTE = 1, 2, 3, 5, 6, 7, 10
DOUBLE_VALUE, INT64_VALUE, BOOL_VALUE, STRING_VALUE = 3, 9, 27, 29

Value = float | int | bool | str


@dataclass(frozen=True)
class Node:
    """One task of one rank.

    node_type: COMP_NODE or COMM_COLL_NODE.  data_deps: ids of nodes that come before it.
    start_micros, duration_micros: whole microseconds.  attributes: by name.
    """

    node_id: int
    name: str
    node_type: int
    data_deps: tuple[int, ...] = ()
    start_micros: int = 0
    duration_micros: int = 0
    attributes: Mapping[str, Value] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Duration: exact if this program wrote the node, else in whole microseconds."""
        return float(self.attributes.get(SECONDS, self.duration_micros / MICRO))


# ---- a simulated step as nodes ----


def nodes_of(step: SimulatedStep, rank: int) -> list[Node]:
    """Nodes for the tasks of a traced rank, in the order in which it began or posted them."""
    number = int(step.class_of[rank])
    spans = _Spans(step.spans[rank])
    nodes: list[Node] = []
    operations: dict[int, int] = {}  # operation -> node
    last_in_channel: dict[str, int] = {}
    last_task: list[int] = []
    awaited: list[int] = []
    for instruction in step.schedule.program:
        if isinstance(instruction, Run):
            if instruction.seconds[number] > 0.0:
                span = spans.take("compute")
                nodes.append(_node(len(nodes), COMP_NODE, span, [*last_task, *awaited], {"is_cpu_op": False}))
                last_task, awaited = [nodes[-1].node_id], []
        elif isinstance(instruction, Post):
            operation = step.schedule.operations[instruction.operation]
            if operation.rank_bytes[number] > 0.0:
                before = [*last_task, *awaited]
                before += [last_in_channel[operation.channel]] if operation.channel in last_in_channel else []
                before += [operations[operation.after]] if operation.after in operations else []
                about = _about(operation, number)
                nodes.append(_node(len(nodes), COMM_COLL_NODE, spans.take(operation.channel), before, about))
                operations[instruction.operation] = last_in_channel[operation.channel] = nodes[-1].node_id
        elif instruction.operation in operations:
            awaited.append(operations[instruction.operation])
    return nodes


class _Spans:
    """Spans of one rank; `take` gives the spans of a stream in order of time."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._streams: dict[str, deque[Span]] = {}
        for span in sorted(spans, key=lambda span: (span.begin_s, span.end_s)):
            self._streams.setdefault(span.stream, deque()).append(span)

    def take(self, stream: str) -> Span:
        return self._streams[stream].popleft()


def _node(node_id: int, node_type: int, span: Span, before: Sequence[int], about: Mapping[str, Value]) -> Node:
    seconds = span.end_s - span.begin_s
    return Node(
        node_id=node_id,
        name=span.label,
        node_type=node_type,
        data_deps=tuple(dict.fromkeys(before)),
        start_micros=round(span.begin_s * MICRO),
        duration_micros=round(seconds * MICRO),
        attributes={**about, SECONDS: seconds},
    )


def _about(operation: Operation, number: int) -> dict[str, Value]:
    kind = KINDS[operation.channel.split()[0]]
    if kind == ALL_REDUCE and operation.pattern != "ring":
        kind = ALL_TO_ALL  # without rings, ranks trade blocks at each level
    return {
        "is_cpu_op": False,
        "comm_type": kind,
        "comm_size": round(float(operation.rank_bytes[number])),
        "pg_name": operation.pattern,
    }


def groups_of(scenario: Scenario, step: SimulatedStep, rank: int) -> dict[str, list[int]]:
    """Ranks of each group that the operations of a rank name."""
    ranks = Ranks.of(scenario.cluster, scenario.layout)
    patterns = ranks.patterns(with_sums=True, gathers_by_level=False)
    used = dict.fromkeys(operation.pattern for operation in step.schedule.operations)
    groups = {}
    for name in used:
        if name in patterns:
            groups[name] = [int(other) for other in (patterns[name] == patterns[name][rank]).nonzero()[0]]
        else:
            groups[name] = list(range(scenario.cluster.num_ranks))
    return groups


def export(scenario: Scenario, step: SimulatedStep, folder: Path) -> list[Path]:
    """Write files step.RANK.et of all traced ranks, and groups.json: rank -> name -> ranks of the group.

    Raises ConfigError if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for rank in step.spans:
            paths.append(folder / f"step.{rank}.et")
            paths[-1].write_bytes(encode(nodes_of(step, rank)))
        groups = {rank: groups_of(scenario, step, rank) for rank in step.spans}
        (folder / "groups.json").write_text(json.dumps(groups))
    except OSError as error:
        raise ConfigError(f"--export-chakra: {folder} cannot be written: {error.strerror}") from error
    return paths


def measured_seconds(path: Path) -> dict[str, float]:
    """Mean seconds of computation for each node name in a trace.  Raises ConfigError if the file is no trace."""
    try:
        nodes = decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--import-chakra: {path} cannot be read: {error.strerror}") from error
    except (ValueError, IndexError, struct.error) as error:
        raise ConfigError(f"--import-chakra: {path} is not a Chakra execution trace: {error}") from error
    seconds: dict[str, list[float]] = {}
    for node in nodes:
        if node.node_type == COMP_NODE:
            seconds.setdefault(node.name, []).append(node.seconds)
    return {name: sum(values) / len(values) for name, values in seconds.items()}


# ---- protobuf ----


def encode(nodes: Sequence[Node]) -> bytes:
    """Content of a file with these nodes."""
    messages = [_text(1, SCHEMA_VERSION), *(_encode_node(node) for node in nodes)]
    return b"".join(_varint(len(message)) + message for message in messages)


def decode(content: bytes) -> list[Node]:
    """Nodes of a file; other fields are skipped.  Raises ValueError, IndexError or struct.error for other files."""
    nodes, position, is_first = [], 0, True
    while position < len(content):
        length, position = _read_varint(content, position)
        if position + length > len(content):
            raise ValueError(f"a message of {length} bytes at byte {position} is cut off")
        if not is_first:  # the first message is GlobalMetadata
            nodes.append(_decode_node(content[position : position + length]))
        is_first, position = False, position + length
    return nodes


def _encode_node(node: Node) -> bytes:
    parts = [_number(ID, node.node_id), _text(NAME, node.name), _number(TYPE, node.node_type)]
    if node.data_deps:
        parts.append(_block(DATA_DEPS, b"".join(map(_varint, node.data_deps))))
    parts += [_number(START, node.start_micros), _number(DURATION, node.duration_micros)]
    parts += [_block(ATTRIBUTE, _encode_attribute(name, value)) for name, value in node.attributes.items()]
    return b"".join(parts)


def _encode_attribute(name: str, value: Value) -> bytes:
    if isinstance(value, bool):
        return _text(1, name) + _number(BOOL_VALUE, int(value))
    if isinstance(value, int):
        return _text(1, name) + _number(INT64_VALUE, value)
    if isinstance(value, float):
        return _text(1, name) + _varint(DOUBLE_VALUE << 3 | FIXED64) + struct.pack("<d", value)
    return _text(1, name) + _text(STRING_VALUE, value)


def _decode_node(message: bytes) -> Node:
    numbers = {ID: 0, TYPE: 0, START: 0, DURATION: 0}
    name, deps, attributes = "", [], {}
    for number, value in _fields(message):
        if number in numbers and isinstance(value, int):
            numbers[number] = value
        elif number == NAME and isinstance(value, bytes):
            name = value.decode()
        elif number == DATA_DEPS:
            deps += [value] if isinstance(value, int) else _unpacked(value)
        elif number == ATTRIBUTE and isinstance(value, bytes):
            attributes.update(_decode_attribute(value))
    return Node(numbers[ID], name, numbers[TYPE], tuple(deps), numbers[START], numbers[DURATION], attributes)


def _decode_attribute(message: bytes) -> dict[str, Value]:
    """The attribute as {name: value}; empty if this module does not use the type of its value."""
    name, found = "", None
    for number, value in _fields(message):
        if number == 1 and isinstance(value, bytes):
            name = value.decode()
        elif number == DOUBLE_VALUE and isinstance(value, bytes):
            found = struct.unpack("<d", value)[0]
        elif number == STRING_VALUE and isinstance(value, bytes):
            found = value.decode()
        elif number in (INT64_VALUE, BOOL_VALUE) and isinstance(value, int):
            found = bool(value) if number == BOOL_VALUE else value
    return {} if found is None else {name: found}


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message: an int for varints, else the bytes."""
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == VARINT:
            value, position = _read_varint(message, position)
            yield number, value
            continue
        if wire_type == BYTES:
            length, position = _read_varint(message, position)
        elif wire_type in (FIXED64, FIXED32):
            length = 8 if wire_type == FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire_type} of field {number} does not exist")
        if position + length > len(message):
            raise ValueError(f"field {number} of {length} bytes is cut off")
        yield number, message[position : position + length]
        position += length


def _unpacked(content: bytes) -> list[int]:
    values, position = [], 0
    while position < len(content):
        value, position = _read_varint(content, position)
        values.append(value)
    return values


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | VARINT) + _varint(value)


def _text(number: int, value: str) -> bytes:
    return _block(number, value.encode())


def _block(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Encode `value` with seven bits in each byte, the lowest bits first."""
    assert value >= 0, value
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def _read_varint(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
