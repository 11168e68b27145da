# SPDX-License-Identifier: Apache-2.0
"""The `plan` subcommand: arguments in, a table or JSON out, and errors that name the argument."""

import json
import re
import shlex
import sys

import pytest
from answered import answered

from ds_hybridep.commands.main import main
from ds_hybridep.commands.question import parse_bits_per_s
from ds_hybridep.config import parse_config
from ds_hybridep.errors import ConfigError
from ds_hybridep.plan.models import read_model_file

QWEN = ["plan", "--model", "Qwen3-30B-A3B", "--dcs", "2x8", "--wan", "10gbps", "--lan", "800gbps", "--tokens", "16384",
        "--memory", "900"]  # fmt: skip
EXACT = [*QWEN, "--codecs", "exact"]


def flat(text):
    """The text without its line breaks."""
    return " ".join(text.split())


def test_a_table_with_the_plan_its_rivals_and_a_block_to_paste():
    code, out, _ = answered(*QWEN, "--delay", "10ms")
    assert code == 0
    assert "Qwen3-30B-A3B: 30.5 B parameters, 3.0 B active, all trained; 48 MoE layers of 128 experts of" in out
    assert "    ours, exact: [2," in out
    assert "->  ours, encoded: [2,4] ep 16" in out
    assert "    FSDP HYBRID_SHARD in each dc" in out
    assert "DeepSpeed, EP 8 in each dc" in out
    said = flat(out)
    assert said.startswith("For you: ")
    # A gain with lossy gradients, and at once what exact ones gain.
    assert re.match(
        r"For you: \S+ times as fast with lossy gradients, .* With exact gradients \(--codecs exact\) it", said
    )
    assert "(domain sizes [2, 4]); what crosses dc is encoded (weights: patch, gradients: low_rank)." in said
    assert "Lossy: gradients that cross the slow link are approximated" in said
    assert "1,000 steps, 262 M tokens, on 16 GPUs: - ours, encoded: [2,4] ep 16: " in said
    assert "2 dc, each with 10 Gbit/s, 10 ms one way (ping 20 ms); 8 gpu in each, each with 800 Gbit/s" in said
    assert "deepspeed --hostfile hosts train.py --deepspeed_config ds_config.json" in out
    assert '"bandwidth_gbps": 10.0' in out


def test_the_block_to_paste_is_read_by_the_config():
    _, out, _ = answered(*EXACT, "--json")
    settings = json.loads(out)["ds_config"]
    config = parse_config(settings["hybridep"], world_size=16)
    assert config.domain_sizes == (2, 1)
    assert config.levels[0].bandwidth_gbps == 10


def test_json_holds_plan_rivals_and_verdict():
    code, out, _ = answered(*EXACT, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["plan"]["domain_sizes"] == [2, 1]
    assert sum(answer["plan"]["terms_s"].values()) == pytest.approx(answer["plan"]["step_s"])
    assert [way["provided"] for way in answer["alternatives"]] == 10 * [True] + 2 * [False]


def test_json_says_what_the_model_is_what_one_has_now_and_what_it_costs():
    _, out, _ = answered(*EXACT, "--steps", "500", "--price-per-gb", "0.1", "--json")
    answer = json.loads(out)
    model = answer["model"]
    assert model["parameters"] == model["trained_parameters"] == 30_532_122_624
    assert model["active_parameters"] == pytest.approx(3.04e9, rel=0.01)
    assert model["autoep"] == "qwen3_moe"
    now, chosen, bill = answer["now"], answer["chosen"], answer["bills"]["chosen"]
    assert now["kind"] == "now"
    assert now["step_s"] == min(row["step_s"] for row in answer["table"] if row["kind"] == "now")
    assert chosen["tokens_per_s"] == pytest.approx(16 * 16384 / chosen["step_s"])
    assert bill["hours"] == pytest.approx(500 * chosen["step_s"] / 3600)
    assert bill["link_gb"] == pytest.approx(500 * 2 * chosen["link_bytes"] / 1e9)
    assert bill["price"] == pytest.approx(0.1 * bill["link_gb"])
    assert bill["link_gb"] == pytest.approx(2 * bill["each_gb"])
    assert (bill["tokens"], bill["gpu_hours"]) == (500 * 16 * 16384, pytest.approx(16 * bill["hours"]))
    assert len(answer["table"]) <= 11
    settings = answer["ds_config"]
    assert settings["expert_parallel"] == {"enabled": True, "autoep_size": 16, "preset_model": "qwen3_moe"}
    assert settings["train_micro_batch_size_per_gpu"] * 4096 == 16384
    assert settings["zero_optimization"] == {"stage": 1}
    assert answer["launch"] == ["deepspeed --hostfile hosts train.py --deepspeed_config ds_config.json"]


def test_a_model_that_autoep_does_not_train_is_said_first():
    _, out, _ = answered(*QWEN, "--model", "OLMoE-1B-7B")
    assert out.startswith("Not for you, because DeepSpeed's AutoEP has no preset for models of this kind.")
    assert "ds_config.json" not in out


TOO_LARGE = [
    *("plan", "--model", "Mixtral-8x7B", "--dcs", "1x8", "--wan", "10gbps", "--tokens", "8192", "--seq", "4096"),
]


def test_what_does_not_fit_is_not_for_you_with_what_to_change():
    code, out, err = answered(*TOO_LARGE, "--checkpointing")
    assert (code, err) == (0, "")
    verdict = flat(out)
    needs = r"the least that this program needs is 1\d\d GB on each GPU, which has 80\. It fits with any one of: "
    assert re.match(f"Not for you, because it does not fit: {needs}", verdict)
    about = r"about [\d.]+ s a step, not for you"
    changes = (
        f"--offload-optimizer: {about}",
        rf"--lora all \(only adapters are trained\): {about}",
        rf"GPUs of 141 GB, such as H200 \(--memory 141\): {about}",
        f"or 16 GPUs instead of 8: {about}",
    )
    assert re.search("; ".join(changes) + r"\. Nothing without this program can do it either: ", verdict)
    assert "1 dc, so --wan and --delay do not count; 8 gpu in each" in verdict
    assert "ds_config.json" not in out
    assert "GPU-hours" not in out  # of what cannot run


@pytest.mark.parametrize("change", [["--offload-optimizer"], ["--lora", "all"], ["--gpu", "H200"], ["--dcs", "1x16"]])
def test_what_to_change_is_true(change):
    _, out, _ = answered(*TOO_LARGE, "--checkpointing", *change, "--json")
    assert json.loads(out)["plan"]["lacking_bytes"] == 0


def test_json_has_the_same_verdict_where_nothing_fits():
    _, out, _ = answered(*TOO_LARGE)
    code, said, _ = answered(*TOO_LARGE, "--json")
    answer = json.loads(said)
    assert code == 0
    assert answer["for_you"] is False
    assert flat(out).startswith(" ".join(answer["verdict"]))
    assert answer["plan"]["lacking_bytes"] > 0
    assert answer["runner_up"] is answer["ds_config"] is answer["launch"] is None


def test_what_others_fit_is_said_where_nothing_of_ours_does():
    """Mixtral over 4 x 8: ZeRO-3 divides its experts by 32, expert parallelism by 8."""
    arguments = ("plan", "--model", "Mixtral-8x7B", "--dcs", "4x8", "--wan", "10gbps", "--checkpointing")
    _, out, _ = answered(*arguments, "--memory", "45")
    verdict = flat(out)
    assert verdict.startswith("Not for you, because it does not fit: ")
    assert "It fits with any one of: --zero-stage 2: " in verdict
    assert "Without this program, FSDP or ZeRO-3, all 32 GPUs fits: " in verdict


def fastest_now_over_all(answer):
    """What people have now, without one datacentre alone."""
    rows = [row for row in answer["table"] if row["kind"] == "now" and row["num_gpus"] == 16]
    return min(rows, key=lambda row: row["step_s"])


def test_zero_plus_plus_is_what_one_has_unless_only_exact_ways_are_asked_for():
    """With one micro-step, its parameters cross once, in 8 bits, and beat gradients that cross in 16."""
    name = "ZeRO++ (lossy) in each dc"
    now = fastest_now_over_all(json.loads(answered(*QWEN, "--json")[1]))
    assert (now["name"], now["training"]) == (name, "lossy")
    answer = json.loads(answered(*EXACT, "--json")[1])
    assert fastest_now_over_all(answer)["name"] == "FSDP HYBRID_SHARD in each dc"
    notes = {way["name"]: way["note"] for way in answer["alternatives"]}
    assert "lossy, and only exact ways are asked for" in notes[name]


def test_an_optimizer_on_the_host_counts_there():
    arguments = [*EXACT, "--offload-optimizer"]
    here, there = (json.loads(answered(*one, "--json")[1]) for one in (EXACT, arguments))
    assert "host_bytes" not in here["plan"]
    # Qwen3-30B-A3B on 16 GPUs, without the room for new parameters and the gradients, which are the host's alone.
    moved = here["plan"]["memory_bytes"] - there["plan"]["memory_bytes"]
    assert there["plan"]["host_bytes"] == pytest.approx(moved * 18 / 12)
    assert moved == pytest.approx(30.5e9 * 12 / 16, rel=2e-3)
    assert not any("sites" in way["name"] for way in there["alternatives"])
    _, out, _ = answered(*arguments)
    assert "the optimizer on the host" in out
    assert "on the host 34.3" in out
    code, _, err = answered(*arguments, "--zero-stage", "0")
    assert code != 0
    assert "DeepSpeed offloads under ZeRO 1 and 2, but --zero-stage is 0" in err


def test_few_experts_on_many_ranks_are_explained():
    """Mixtral on 2 x 8: expert parallelism over all 16 ranks is impossible."""
    arguments = [
        "plan",
        "--model",
        "Mixtral-8x7B",
        "--dcs",
        "2x8",
        "--wan",
        "10gbps",
        "--lan",
        "800gbps",
        "--memory",
        "900",
    ]
    # One datacentre alone cannot hold it, so one job over both is for you.
    few = ("--tokens", "4096", "--codecs", "exact", "--wan", "25gbps", "--checkpointing", "--memory", "90")
    _, out, _ = answered(*arguments, *few)
    assert "8 experts cannot be spread over 16 ranks" in out
    assert "8 ranks at equal distances over every dc; use_data_before_expert_parallelism makes it so" in out
    assert '"use_data_before_expert_parallelism": true' in out
    fitting = ("--tokens", "8192", "--accumulation", "4", "--checkpointing", "--memory", "80")
    _, out, _ = answered(*arguments, *fitting)
    said = "The 8 GPUs that share the experts are inside one dc: no token and no replica crosses the slow link"
    assert said in flat(out)


def test_not_for_those_whose_gradients_are_few_and_whose_parameters_pass_a_fast_link():
    adapters = ("--lora", "attention", "--tokens", "8192", "--checkpointing", "--accumulation", "4")
    code, out, _ = answered(*QWEN, *adapters, "--wan", "1gbps", "--lan", "3600gbps", "--memory", "80")
    assert code == 0
    assert out.startswith("Not for you, because what you can have without this program is as fast: ")
    assert "with FSDP HYBRID_SHARD in each dc" in flat(out)
    assert "DeepSpeed alone does not train these adapters" in flat(out)
    assert "ds_config.json" not in out


def test_a_cluster_file_and_a_model_file(tmp_path):
    cluster, model = tmp_path / "cluster.yaml", tmp_path / "toy.json"
    cluster.write_text(
        "levels:\n- {name: dc, size: 2, bandwidth_gbps: 1}\n- {name: node, size: 2}\n- {name: gpu, size: 2}\n"
    )
    content = {"layers": 2, "hidden": 64, "ffn": 256, "experts": 8, "top_k": 2}
    model.write_text(json.dumps(content))
    arguments = ("--model", str(model), "--cluster", str(cluster), "--tokens", "77", "--dtype", "fp32")
    code, out, _ = answered("plan", *arguments)
    assert code == 0
    assert "toy: " in out
    assert (
        "2 dc, each with 1 Gbit/s, 0 ms assumed (give --delay); 2 node in each, each with 8 Gbit/s assumed; 2 gpu in "
        "each, each with 64 Gbit/s assumed"
    ) in flat(out)
    assert "77 tokens per GPU and micro-step, sequences of 77, 1 micro-step, 4 B per parameter" in out


def test_recommended_codecs_are_tried_and_pasted():
    _, out, _ = answered(*QWEN)
    assert "->  ours, encoded: [2,4] ep 16" in out
    assert "what crosses dc is encoded" in flat(out)
    assert '"codecs": "recommended"' in out
    settings = json.loads(answered(*QWEN, "--json")[1])["ds_config"]
    config = parse_config(settings["hybridep"], world_size=16)
    assert [level.codecs for level in config.levels] == ["recommended", None]
    _, out, _ = answered(*QWEN, "--codecs", "exact")
    assert "recommended" not in out
    assert "ours, encoded" not in out


def test_a_lower_learning_rate_makes_patches_smaller():
    sent = []
    for rate in ("1e-4", "1e-6"):
        _, out, _ = answered(*QWEN, "--learning-rate", rate, "--json")
        plan = json.loads(out)["plan"]
        assert plan["weight_codecs"][0] == "patch"
        sent.append(plan["uplink_bytes"][0]["expert_weights"])
    assert sent[0] / sent[1] == pytest.approx(202 / 16, rel=1e-3)


SKEWED = [
    *("plan", "--model", "Qwen3-30B-A3B", "--dcs", "2x8", "--wan", "10gbps", "--lan", "3200gbps", "--tokens", "8192"),
    *("--checkpointing", "--accumulation", "4", "--memory", "80", "--skew", "3"),
]


def test_a_skew_says_what_hot_experts_bring():
    code, out, _ = answered(*SKEWED, "--hot-memory-gb", "6")
    assert code == 0
    assert "skew 3" in out
    header = next(line for line in out.splitlines() if "s/step" in line)
    assert header.endswith("fullest")
    assert re.search(r"\([a-z]\) at most [124] hot experts in each layer, inside gpu\.", flat(out))
    assert re.search(
        r"Hot experts: [124] of each layer, inside level gpu\. The fullest rank computes 1\.\d\d instead of \d\.\d\d ",
        out,
    )
    assert re.search(r'"name": "gpu",\s+"size": 8,[^}]*"hot_experts": [124]', out)
    assert "DeepSpeed, EP 8 " in out
    assert "% of the rows" in flat(out)


def test_json_has_hot_experts_and_what_they_bring():
    _, out, _ = answered(*SKEWED, "--json")
    answer = json.loads(out)
    plan = answer["plan"]
    assert plan["hot_experts"][0] == 0 < plan["hot_experts"][1]
    assert plan["load_before"] > plan["load_after"] >= 1.0
    config = parse_config(answer["ds_config"]["hybridep"], world_size=16)
    assert config.levels[1].hot_experts == plan["hot_experts"][1]
    _, out, _ = answered(*QWEN, "--json")
    assert "hot_experts" not in out


def test_a_skew_is_that_of_the_largest_group_in_all_plans():
    _, out, _ = answered(*SKEWED, "--json")
    answer = json.loads(out)
    plain = [one for one in answer["others"] if one["domain_sizes"] == [1, 1] and not any(one["hot_experts"])]
    by_group = {one["ep_size"]: one["load_before"] for one in plain}
    assert by_group[16] == pytest.approx(3.0, rel=1e-6)
    assert 1.0 < by_group[8] < 3.0


def test_little_skew_needs_no_hot_experts():
    _, out, _ = answered(*QWEN, "--tokens", "512", "--skew", "1.01")
    assert "Hot experts: none. The fullest rank computes 1.0" in out


def test_sums_by_deepspeed_are_in_the_block_and_not_encoded():
    _, out, _ = answered(*QWEN, "--dense-sync", "deepspeed", "--json")
    answer = json.loads(out)
    config = parse_config(answer["ds_config"]["hybridep"], world_size=16)
    assert config.dense_sync == "deepspeed"
    dense = [one["uplink_bytes"][0]["dense_sync"] for one in (answer["plan"], *answer["others"])]
    assert len(set(dense)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "Qwen3-30B-A3B"], "--dcs, --cluster: give one of them"),
        (["--model", "Qwen3-30B-A3B", "--dcs", "2x8"], "--wan: missing"),
        (["--model", "Qwen3-30B-A3B", "--dcs", "2by8", "--wan", "1gbps"], "--dcs: got '2by8'"),
        (["--model", "qwen9", "--dcs", "2x8", "--wan", "1gbps"], "--model: qwen9 is no ready model"),
        (
            ["--model", "a/qwen9", "--dcs", "2x8", "--wan", "1gbps"],
            "'hf download ORG/NAME config.json --local-dir NAME'",
        ),
        (["--model", "Qwen3-30B-A3B", "--dcs", "8+16", "--wan", "1gbps"], "each has as many GPUs as the others"),
        ([*QWEN[1:], "--dcs", "1x8", "--sweep", "wan"], "--sweep: there is one datacentre"),
        ([*QWEN[1:], "--zero-stage", "3"], "--zero-stage: got 3, wanted 0, 1 or 2; the table has ZeRO-3 in any case"),
        ([*QWEN[1:], "--dtype", "4bit"], "4-bit weights (QLoRA) are not priced"),
        (["--model", "Qwen3-30B-A3B", "--dcs", "2x8", "--wan", "1GB"], "--wan: got '1GB', wanted bits per second"),
        (["--model", "Qwen3-30B-A3B", "--dcs", "2x8", "--cluster", "x"], "--dcs, --cluster: give one of them"),
        ([*QWEN[1:], "--mfu", "2"], "--tflops and --mfu: got 989 and 2"),
        ([*QWEN[1:], "--overlap", "2"], "overlap is 2.0, but must be between 0 and 1"),
        ([*QWEN[1:], "--ep-size", "3"], "ep_size 3 is no regular grid"),
        (
            [*QWEN[1:], "--skew", "0.5"],
            "skew is 0.5, but must be between 1 and 16, the most that 128 experts with top-8",
        ),
        ([*QWEN[1:], "--skew", "17"], "skew is 17, but must be between 1 and 16"),
        ([*QWEN[1:], "--skew", "2", "--hot-memory-gb", "0"], "--hot-memory-gb: got 0, wanted > 0"),
        ([*QWEN[1:], "--lora-rank", "8"], "--lora-rank: gives the rank of adapters, but --lora is none; add --lora"),
        (
            [*QWEN[1:], "--lora", "all", "--zero-stage", "2"],
            "--zero-stage: got 2 with --lora all, but adapters of exp",
        ),
        ([*QWEN[1:], "--seq", "16385"], "--seq: got 16385, but a GPU has only 16384 tokens in a micro-step"),
        ([*QWEN[1:], "--hot-memory-gb", "4"], "--hot-memory-gb: limits hot experts, but routing is even; add --skew"),
        ([*QWEN[1:], "--offload-optimizer", "--zero-stage", "0"], "--zero-stage is 0; give 1 or 2"),
        ([*QWEN[1:], "--steps", "0"], "--steps and --price-per-gb: got 0 and None, wanted >= 1 and >= 0"),
        ([*QWEN[1:], "--gpu", "V100"], "--gpu: got 'V100', wanted one of A100-40, A100-80, H100"),
        ([*QWEN[1:], "--memory", "0"], "--memory and --host-memory: got 0 and 128, wanted > 0, and >= 0"),
        ([*QWEN[1:], "--learning-rate", "0"], "learning_rate is 0.0, but must be a finite number > 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    code, _, err = answered("plan", *arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--lora"],
            "argument --lora: expected one argument of none, attention, experts, all; see ds_hybridep plan --h",
        ),
        (["--lora", "gate"], "argument --lora: invalid choice: 'gate'"),
        (["--price-per-gb", "$0.08"], "argument --price-per-gb: invalid float value: '$0.08'; see ds_hybridep plan"),
    ],
)
def test_what_argparse_refuses_is_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as left:
        main([*QWEN, *arguments])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_ready_model_has_its_name_on_the_hub_too_and_a_dense_one_is_called_so(tmp_path, monkeypatch):
    short, long = (flat(answered(*QWEN, "--model", name)[1]) for name in ("Qwen3-30B-A3B", "Qwen/qwen3-30b-a3b"))
    assert short == long
    dense = tmp_path / "llama.json"
    dense.write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}))
    code, _, err = answered(*QWEN, "--model", str(dense))
    assert code == 2
    assert "so it seems dense; this program is for Mixture-of-Experts models" in err


def test_adapters_bring_lines_for_the_script_and_their_own_rate():
    arguments = ("--lora", "all", "--lora-rank", "8", "--wan", "1gbps")
    _, out, _ = answered(*QWEN, *arguments)
    assert "trained: adapters of rank 8 beside attention, experts and dense layers" in flat(out)
    assert "learning rate 0.0001 (default)" in flat(out)
    answer = json.loads(answered(*QWEN, *arguments, "--json")[1])
    assert answer["ds_config"]["optimizer"]["params"]["lr"] == 1e-4
    assert answer["adapters"] == {
        "r": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    text = out.split("In train.py, before deepspeed.initialize or the Trainer:\n")[1].split("\nStart it:")[0]
    assert text.startswith("  import peft\n\n  adapters = peft.LoraConfig(\n      r=8,\n      target_modules=[")
    compile("\n".join(line[2:] for line in text.splitlines()), "train.py", "exec")
    _, out, _ = answered(*QWEN)
    assert "peft" not in out


def test_more_tokens_in_a_step_that_turn_the_answer_are_named_and_it_is_true():
    few = (
        "--lora",
        "attention",
        "--wan",
        "200mbit",
        "--tokens",
        "8192",
        "--checkpointing",
        "--memory",
        "80",
        "--lan",
        "3600gbps",
    )
    _, out, _ = answered(*QWEN, *few)
    assert out.startswith("For you: ")
    turned = re.search(r"With --accumulation (\d) \([\d.]+ (M|k) tokens in a step\) it is not for you: ", flat(out))
    assert turned
    before, after = int(turned[1]) // 2, turned[1]
    assert answered(*QWEN, *few, "--accumulation", after)[1].startswith("Not for you, ")
    assert answered(*QWEN, *few, "--accumulation", str(before))[1].startswith("For you: ")


@pytest.mark.parametrize(
    "arguments",
    [
        [*QWEN, "--delay", "10ms", "--price-per-gb", "0.08"],
        [*QWEN, "--lora", "all", "--wan", "1gbps"],
        [*("plan", "--model", "Mixtral-8x7B", "--dcs", "2x8", "--wan", "25gbps", "--skew", "2"), "--memory", "900"],
        [*("plan", "--model", "DeepSeek-V3", "--dcs", "2x8", "--wan", "25gbps")],
    ],
)
def test_no_line_is_wider_than_a_terminal(arguments):
    _, out, _ = answered(*arguments)
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("text", "bits_per_s"), [("10gbps", 1e10), ("200mbit", 2e8), ("1.5 Tbps", 1.5e12), ("64Kbit", 64e3)]
)
def test_rates(text, bits_per_s):
    assert parse_bits_per_s(text, "--wan") == bits_per_s


@pytest.mark.parametrize("text", ["10", "gbps", "0gbps", "10GBps", "-1gbps", "10gb"])
def test_wrong_rates_name_the_argument(text):
    with pytest.raises(ConfigError, match=r"--wan: got .*, wanted bits per second, as in 10gbps or 200mbit"):
        parse_bits_per_s(text, "--wan")


def test_planning_loads_neither_torch_nor_deepspeed():
    import subprocess

    program = (
        "import sys; from ds_hybridep.commands.main import main; main(['plan', '--model', 'Qwen3-30B-A3B', "
        "'--dcs', '2x2', '--wan', '1gbps', '--json']); assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr


def test_a_reader_that_wants_the_first_lines_alone_gets_them_without_a_traceback():
    import subprocess

    command = shlex.join([sys.executable, "-m", "ds_hybridep.commands.main", *QWEN])
    script = f"{command} | true; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=500)

    assert (run.returncode, run.stderr) == (141, "")


def test_the_examples_of_the_help_are_answered(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text(json.dumps(read_model_file("Qwen3-30B-A3B")))
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    examples = capsys.readouterr().out.split("examples:\n")[1].replace("\\\n", " ").splitlines()
    answers = [answered(*shlex.split(line)[1:]) for line in examples if line.strip()]
    assert [(code, out.split()[0]) for code, out, _ in answers] == [(0, "For"), (0, "Not")]
