# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hybridep.commands.main import main
from ds_hybridep.errors import ConfigError
from ds_hybridep.plan.cluster import Cluster, Level, Link
from ds_hybridep.plan.layout import Layout, LevelCodecs, Rates, SyncModel
from ds_hybridep.plan.workload import MoEModel, Workload
from ds_hybridep.simulate import chakra
from ds_hybridep.simulate.chakra import COMM_COLL_NODE, COMP_NODE, Node
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.simulator import simulate

MODEL = MoEModel(
    name="toy", hidden=64, num_experts=8, top_k=2, num_moe_layers=3, expert_params=33088, dense_params=110720,
    active_dense_params=94336,
)  # fmt: skip


def scenario_of(**settings):
    return Scenario(
        cluster=Cluster((Level("dc", 2, Link(1e7, 0.001)), Level("gpu", 2, Link(1e9, 0.0)))),
        layout=Layout(spans=(2, 2), domain_sizes=(2, 1), codecs=(LevelCodecs(),) * 2),
        workload=Workload(model=MODEL, tokens_per_rank=512, micro_steps=2),
        rates=Rates(flops_per_s=1e9, packet_s=1e-4),
        **settings,
    )


names = st.text(string.printable, max_size=20)
values = st.one_of(
    st.booleans(), st.integers(0, 2**63 - 1), st.floats(allow_nan=False), st.text(string.printable, max_size=20)
)
nodes = st.builds(
    Node,
    node_id=st.integers(0, 2**64 - 1),
    name=names,
    node_type=st.sampled_from([COMP_NODE, COMM_COLL_NODE]),
    data_deps=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    start_micros=st.integers(0, 2**50),
    duration_micros=st.integers(0, 2**50),
    attributes=st.dictionaries(names, values, max_size=4),
)


@settings(max_examples=60)
@given(st.lists(nodes, max_size=5))
def test_what_is_written_is_read_again(written):
    assert chakra.decode(chakra.encode(written)) == written


def published_messages():
    """GlobalMetadata and Node with the fields of the published schema that are used, as protobuf's own classes."""
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    messages = {
        "AttributeProto": [
            ("name", 1, field.TYPE_STRING), ("doc_string", 2, field.TYPE_STRING), ("double_val", 3, field.TYPE_DOUBLE),
            ("int64_val", 9, field.TYPE_INT64), ("bool_val", 27, field.TYPE_BOOL),
            ("string_val", 29, field.TYPE_STRING),
        ],
        "GlobalMetadata": [("version", 1, field.TYPE_STRING), ("attr", 2, field.TYPE_MESSAGE)],
        "Node": [
            ("id", 1, field.TYPE_UINT64), ("name", 2, field.TYPE_STRING), ("type", 3, field.TYPE_ENUM),
            ("ctrl_deps", 4, field.TYPE_UINT64), ("data_deps", 5, field.TYPE_UINT64),
            ("start_time_micros", 6, field.TYPE_UINT64), ("duration_micros", 7, field.TYPE_UINT64),
            ("attr", 10, field.TYPE_MESSAGE),
        ],
    }  # fmt: skip
    kinds = file.enum_type.add(name="NodeType")
    for number, name in ((0, "INVALID_NODE"), (4, "COMP_NODE"), (7, "COMM_COLL_NODE")):
        kinds.value.add(name=name, number=number)
    for message, fields in messages.items():
        described = file.message_type.add(name=message)
        if message == "AttributeProto":
            described.oneof_decl.add(name="value")
        for name, number, kind in fields:
            is_repeated = name in ("attr", "ctrl_deps", "data_deps")
            label = field.LABEL_REPEATED if is_repeated else field.LABEL_OPTIONAL
            one = described.field.add(name=name, number=number, type=kind, label=label)
            if kind == field.TYPE_MESSAGE:
                one.type_name = ".ChakraProtoMsg.AttributeProto"
            elif kind == field.TYPE_ENUM:
                one.type_name = ".ChakraProtoMsg.NodeType"
            if message == "AttributeProto" and name.endswith("_val"):
                one.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return tuple(
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in ("GlobalMetadata", "Node")
    )


def test_traces_load_with_the_published_schema():
    metadata_class, node_class = published_messages()
    from google.protobuf import unknown_fields

    step = simulate(scenario_of(), traced_ranks=[1])
    written = chakra.nodes_of(step, 1)
    content, position, messages = chakra.encode(written), 0, []
    while position < len(content):
        length, position = chakra._read_varint(content, position)
        message = (node_class if messages else metadata_class)()
        message.ParseFromString(content[position : position + length])
        assert len(unknown_fields.UnknownFieldSet(message)) == 0
        messages.append(message)
        position += length
    assert messages[0].version == chakra.SCHEMA_VERSION
    for read, node in zip(messages[1:], written, strict=True):
        assert (read.id, read.name, read.type) == (node.node_id, node.name, node.node_type)
        assert tuple(read.data_deps) == node.data_deps
        assert (read.start_time_micros, read.duration_micros) == (node.start_micros, node.duration_micros)
        found = {one.name: getattr(one, one.WhichOneof("value")) for one in read.attr}
        assert found == node.attributes
    # And what protobuf itself writes is read here.
    again = b"".join(chakra._varint(m.ByteSize()) + m.SerializeToString() for m in messages)
    assert chakra.decode(again) == written


@pytest.mark.parametrize("sync", [SyncModel(algorithm="ring"), SyncModel()])
def test_the_nodes_of_a_rank_are_its_step(sync):
    scenario = scenario_of(sync=sync)
    step = simulate(scenario, traced_ranks=[3])
    written = chakra.nodes_of(step, 3)
    compute = [node for node in written if node.node_type == COMP_NODE]
    communication = [node for node in written if node.node_type == COMM_COLL_NODE]
    assert len(compute) + len(communication) == len(step.spans[3])
    sent = sum(sum(kinds.values()) for kinds in step.sent_bytes) / 4
    exported = sum(node.attributes["comm_size"] for node in communication)
    assert abs(exported - sent) <= 0.5 * len(communication)  # sizes are whole bytes
    ends = {node.node_id: node.start_micros + node.duration_micros for node in written}
    for (
        node
    ) in written:  # nothing begins before what it depends on is over, but for what queues behind it in a channel
        assert all(dep < node.node_id for dep in node.data_deps)
        if node.node_type == COMP_NODE:
            assert all(ends[dep] <= node.start_micros + 2 for dep in node.data_deps)
    groups = chakra.groups_of(scenario, step, 3)
    assert groups["gather 0"] == [1, 3]
    assert {node.attributes["pg_name"] for node in communication} <= set(groups)


def test_a_round_trip_keeps_the_step(tmp_path):
    scenario = scenario_of()
    step = simulate(scenario, traced_ranks=[0])
    (path,) = chakra.export(scenario, step, tmp_path / "traces")
    again = dataclasses.replace(
        scenario, rates=Rates(flops_per_s=1.0, packet_s=1e-4), measured_s=chakra.measured_seconds(path)
    )
    assert simulate(again).step_s == pytest.approx(step.step_s, rel=1e-12)
    written, read = chakra.nodes_of(step, 0), chakra.decode(path.read_bytes())
    assert [node.seconds for node in read] == [node.seconds for node in written]


def test_the_command_writes_traces_and_simulates_with_measured_ones(tmp_path, capsys):
    (tmp_path / "moe.yaml").write_text("layers: 2\nhidden: 64\nffn: 128\nexperts: 8\ntop_k: 2\ntokens: 256\n")
    command = ["simulate", "--model", str(tmp_path / "moe.yaml"), "--dcs", "2x2", "--wan", "10mbit", "--json"]
    assert main([*command, "--export-chakra", str(tmp_path / "out")]) == 0
    first = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "groups.json",
        *(f"step.{r}.et" for r in range(4)),
    ]
    assert set(json.loads((tmp_path / "out" / "groups.json").read_text())) == {"0", "1", "2", "3"}
    measured = ["--import-chakra", str(tmp_path / "out" / "step.2.et")]
    assert main([*command, "--mfu", "0.001", *measured]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["plans"][0]["terms_s"]["dense_s"] == pytest.approx(first["plans"][0]["terms_s"]["dense_s"])


@pytest.mark.parametrize("content", [b"\xff", b"\x05abc", b"\x00\x02\x0b\x01", b"\x00\x03\x12\x09a"])
def test_files_that_are_no_traces_are_refused(tmp_path, content):
    path = tmp_path / "step.et"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="--import-chakra: .*step.et is not a Chakra execution trace"):
        chakra.measured_seconds(path)


def test_files_that_cannot_be_opened_are_named(tmp_path):
    with pytest.raises(ConfigError, match="--import-chakra: .*none.et cannot be read: No such file"):
        chakra.measured_seconds(tmp_path / "none.et")
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="--export-chakra: .*taken cannot be written: "):
        chakra.export(scenario_of(), simulate(scenario_of(), traced_ranks=[0]), tmp_path / "taken")
