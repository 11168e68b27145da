# SPDX-License-Identifier: Apache-2.0
"""Draws docs/images/rooms.svg and gradient.svg.  The order of the rooms is that of the contract in pyproject.toml.

python .ci/drawings.py
"""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
IMAGES = REPOSITORY / "docs" / "images"
INK, PALE, LINE, TOKEN, EXPERT = "#1f2933", "#3e4c59", "#9aa5b1", "#0072b2", "#d55e00"

ROOMS = {
    "commands": "the command line: plan, simulate, probe, lab, report, show, export, meet",
    "deepspeed": "all that touches DeepSpeed: start, step, patches, MoE layers, optimizers",
    "runtime": "what one engine has under one plan, its statistics and its state",
    "adaptive": "a job that measures itself and changes its plan",
    "simulate": "a step, event by event; no torch",
    "plan": "predictions and search; no torch",
    "sites": "jobs of their own that train one model together",
    "tokens": "the way of a token: dispatch, experts, combine",
    "experts": "the way of an expert: replicas, shipments, gradient returns",
    "sync": "keeping parameters equal: error feedback, sums and gathers by level",
    "transport": "channels between ranks, counters, agreement, the watch",
    "link": "frames over TCP or TLS; alive, silent or gone",
    "codecs": "tensors to packets and back",
    "kernels": "local tensor operations: PyTorch, C++, CUDA",
    "config": "the “hybridep” block",
    "export": "checkpoints to folders that transformers and peft load",
    "geometry": "where ranks, experts and slices lie, and how many bytes they have; no torch",
}
OF_TOKENS = {"deepspeed", "tokens", "transport", "link", "kernels"}
OF_EXPERTS = {"deepspeed", "runtime", "experts", "sync", "transport", "link", "codecs", "kernels"}


def text(x: float, y: float, words: str, *, size: int = 13, colour: str = PALE, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}">{words}</text>'


def box(x: float, y: float, width: float, height: float, *, fill: str = "#eef2f6", stroke: str = LINE) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{stroke}"/>'


def page(width: int, height: int, label: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="DejaVu Sans, Arial, sans-serif" role="img" aria-label="{label}">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts, "</svg>", ""])


def rooms() -> str:
    layers = re.search(r"^layers = \[(.*?)^\]", (REPOSITORY / "pyproject.toml").read_text(), re.S | re.M)
    assert layers is not None
    order = [name for name in re.findall(r'"ds_hybridep\.(\w+)"', layers[1]) if name in ROOMS]
    assert set(order) == set(ROOMS), f"rooms without a place: {set(ROOMS) - set(order)}"
    parts = [text(20, 30, "Each folder imports only from folders below it", size=16, colour=INK, weight="bold")]
    for x, colour, words in ((500, TOKEN, "a token passes"), (630, EXPERT, "an expert passes")):
        parts += [f'<circle cx="{x}" cy="25" r="6" fill="{colour}"/>', text(x + 12, 30, words, colour=INK)]
    for number, name in enumerate(order):
        y = 54 + 46 * number
        parts += [box(20, y, 720, 38), text(34, y + 24, name, size=15, colour=INK, weight="bold")]
        parts.append(text(160, y + 24, ROOMS[name]))
        for x, colour, passed in ((698, TOKEN, OF_TOKENS), (720, EXPERT, OF_EXPERTS)):
            if name in passed:
                parts.append(f'<circle cx="{x}" cy="{y + 19}" r="6" fill="{colour}"/>')
    label = "The folders of ds_hybridep, one above the other; each imports only from below"
    return page(760, 64 + 46 * len(order), label, parts)


HOLDER = [  # what happens, and where: files and their classes
    ("autograd has the gradient of a replica", "experts/gradient_return.py: _StartReturn"),
    ("added to the sums of its slot, fp32", "experts/gradient_return.py: GradientSums"),
    ("at the boundary, level by level, the fastest first", "sync/transfers.py: Reduce, StagePipeline"),
    ("a slot's sums become a message for a level", "sync/error_feedback.py: SlotCodecs"),
    ("+ residual, encoded; what is left is the next residual", "sync/error_feedback.py: GradientSender; codecs/"),
    ("the message leaves", "transport/channels.py: Channel; link/"),
]
OWNER = [
    ("+ copies in other EP groups; then the step", "deepspeed/data_parallel.py; deepspeed/step.py"),
    ("+ what earlier plans left undelivered", "sync/undelivered.py: UndeliveredGradients"),
    ("after all levels, added to the owner's own gradient", "experts/gradient_return.py: _FinishReturn"),
    ("added to the sums of its slot", "sync/transfers.py: Reduce"),
    ("in order, decoded", "sync/error_feedback.py: GradientReceiver; codecs/"),
    ("the message arrives", "transport/channels.py: Channel; link/"),
]


def gradient() -> str:
    parts = [
        text(20, 30, "The gradient of an expert", size=16, colour=INK, weight="bold"),
        text(20, 62, "on a rank that holds a replica", size=14, colour=EXPERT, weight="bold"),
        text(420, 62, "on its owner", size=14, colour=EXPERT, weight="bold"),
    ]
    step = 62
    for x, rows, is_down in ((20, HOLDER, True), (420, OWNER, False)):
        for number, (what, who) in enumerate(rows):
            y = 76 + step * number
            parts += [box(x, y, 360, 46), text(x + 12, y + 19, what, colour=INK)]
            parts.append(text(x + 12, y + 37, who, size=12))
            if number:
                parts.append(arrow(x + 30, y - 16, x + 30, y) if is_down else arrow(x + 30, y, x + 30, y - 16))
    y = 76 + step * (len(HOLDER) - 1) + 23
    parts.append(arrow(380, y, 420, y))
    below = y + 62
    parts += [
        box(20, below, 760, 64, fill="#fff8f0", stroke=EXPERT),
        text(32, below + 19, "transaction.py: who keeps something between steps joins before it changes", colour=INK),
        text(32, below + 37, "commit, when the optimizer step is applied: residuals and packet numbers stay"),
        text(32, below + 55, "undo, when it is skipped or its gradients are dropped: they are again as before"),
    ]
    return page(
        800, int(below + 84), "A gradient's way from the backward of a replica to the owner's optimizer", parts
    )


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    tip = (x2 - 6, y2 - 4, x2 - 6, y2 + 4) if y1 == y2 else (
        (x2 - 4, y2 - 6, x2 + 4, y2 - 6) if y2 > y1 else (x2 - 4, y2 + 6, x2 + 4, y2 + 6)
    )  # fmt: skip
    head = f'<path d="M{x2} {y2} L{tip[0]} {tip[1]} L{tip[2]} {tip[3]} Z" fill="{PALE}"/>'
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{PALE}" stroke-width="1.5"/>{head}'


DRAWINGS = {"rooms.svg": rooms, "gradient.svg": gradient}


def main() -> None:
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(draw())
        print(f"docs/images/{name}")


if __name__ == "__main__":
    main()
