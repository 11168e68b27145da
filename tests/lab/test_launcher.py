# SPDX-License-Identifier: Apache-2.0
"""Ranks on emulated hosts: what they compute, what is logged, and how a run that goes wrong ends."""

import io
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from marks import slow
from scripts import output_of

from ds_hybridep.commands import lab as lab_command
from ds_hybridep.commands.main import main
from ds_hybridep.errors import ConfigError
from ds_hybridep.lab import namespaces, network
from ds_hybridep.lab.launcher import RankProcesses, rank_environment, run_ranks
from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology

HERE = Path(__file__).parent
REPOSITORY = Path(__file__).resolve().parents[2]
LINKS = LinkSpec(wan_bits_per_s=200e6, wan_delay_s=0.005)
ALLREDUCE = [sys.executable, str(HERE / "allreduce_script.py"), "250000"]
EXCHANGE = [sys.executable, "-IS", str(HERE / "exchange_script.py"), "250000"]


@pytest.fixture
def net(permitted):
    with EmulatedNetwork(Topology(2, 2), LINKS) as network:
        yield network


@pytest.mark.dist
@pytest.mark.parametrize(
    ("command", "ranks_each"),
    [(EXCHANGE, 1), slow(ALLREDUCE, 1), slow(ALLREDUCE, 2)],
    ids=["sockets", "gloo, two ranks", "gloo, four ranks"],
)
def test_ranks_all_reduce_over_the_slow_link(permitted, tmp_path, command, ranks_each):
    live, num_ranks = io.StringIO(), 2 * ranks_each
    with EmulatedNetwork(Topology(2, ranks_each), LINKS) as network:
        result = run_ranks(network, command, log_dir=tmp_path, timeout_s=300, live=live)
    assert (result.is_success, result.exit_codes, result.failed_ranks) == (True, (0,) * num_ranks, ())
    for rank in range(num_ranks):
        assert f"rank {rank} of {num_ranks}: {sum(range(num_ranks + 1))}" in result.log_files[rank].read_text()
    assert live.getvalue() == (tmp_path / "rank0.log").read_text()
    # A ring sends 1 MB over each uplink and direction between two ranks, and 3/2 of it among four.
    for uplink in result.uplinks:
        assert 0.9e6 < uplink.out_bytes < 3e6
        assert 0.9e6 < uplink.in_bytes < 3e6
    text = str(result)
    assert text.startswith("done\n")
    assert " ".join(["exit codes by rank", *(f"{rank}:0" for rank in range(num_ranks))]) in text
    assert f"DC 1: {result.uplinks[1].out_bytes / 1e6:.3f} MB out" in text


@pytest.mark.dist
def test_a_rank_that_fails_is_named_and_the_others_are_ended(net, tmp_path):
    command = ["sh", "-c", "test $RANK = 2 || exec sleep 300; echo leaving with code 7; exit 7"]
    result = run_ranks(net, command, log_dir=tmp_path, timeout_s=300)
    assert result.failure.startswith("rank 2 exited with code 7")
    assert result.failed_ranks[0] == 2
    assert result.exit_codes[2] == 7
    assert 0 not in result.exit_codes
    assert not result.timed_out
    assert result.tail_of_log(2).endswith("leaving with code 7")
    assert str(result).startswith("FAILED: rank 2 exited with code 7")


@pytest.mark.dist
def test_a_rank_that_a_signal_ended_is_named(net, tmp_path):
    command = ["sh", "-c", "test $RANK = 0 || kill -9 $$; exec sleep 300"]
    result = run_ranks(net, command, log_dir=tmp_path)
    assert re.match("rank [123] was ended by SIGKILL", result.failure)
    assert result.exit_codes == (-signal.SIGKILL,) * 4


@pytest.mark.dist
def test_the_time_limit_ends_ranks_that_hang_and_names_them(net, tmp_path):
    command = ["sh", "-c", "case $RANK in 1|3) exec sleep 300;; esac"]
    result = run_ranks(net, command, log_dir=tmp_path, timeout_s=3)
    assert result.timed_out
    assert result.failure == "time limit of 3 s reached with rank(s) 1, 3 still running"
    assert result.exit_codes == (0, -signal.SIGKILL, 0, -signal.SIGKILL)
    assert result.failed_ranks == ()


def lab_of_one(tmp_path, script):
    """The subcommand as a process of its own, whose rank has written its PID."""
    line = ["lab", "--dcs", "1x1", "--wan", "1gbit", "--delay", "1ms", "--log-dir", str(tmp_path), "--", "sh", "-c"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "ds_hybridep.commands.main", *line, f"echo $$; {script}"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
    )
    return launcher, int(launcher.stdout.readline())


@pytest.mark.dist
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
def test_ranks_die_with_a_launcher_that_is_killed(permitted, lab_namespaces, wait_until_gone, tmp_path):
    launcher, pid = lab_of_one(tmp_path, "exec sleep 300")
    launcher.kill()
    launcher.communicate()
    wait_until_gone(pid)
    namespaces.reap_orphans()
    assert lab_namespaces(launcher.pid) == []


@pytest.mark.dist
def test_sigterm_takes_everything_down(permitted, lab_namespaces, tmp_path):
    launcher, pid = lab_of_one(tmp_path, "sleep 300")
    launcher.terminate()
    launcher.communicate(timeout=500)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert namespaces.start_time(pid) is None
    assert lab_namespaces(launcher.pid) == []


@pytest.mark.dist
@pytest.mark.slow
def test_the_lab_subcommand(permitted, tmp_path, capsys):
    line = ["lab", "--dcs", "2x1", "--wan", "200mbit", "--delay", "2ms", "--log-dir", str(tmp_path)]
    line += ["--timeout", "50s"]
    assert main([*line, "--", *ALLREDUCE]) == 0
    shown = capsys.readouterr().out
    assert "rank 0 of 2: 3" in shown
    assert "rank 1 of 2: 3" not in shown

    assert main([*line, "--", "sh", "-c", 'test "$RANK" = 0 || exec sleep 300; echo oh no; exit 3']) == 1
    output = capsys.readouterr()
    assert "FAILED: rank 0 exited with code 3" in output.out
    assert "end of the log of rank 0:\noh no" in output.err
    assert main([*line, "--timeout", "300ms", "--", "sleep", "300"]) == 124
    assert "FAILED: time limit of 0.3 s reached with rank(s) 0, 1 still running" in capsys.readouterr().out


def test_where_namespaces_are_not_permitted_the_reason_is_said(monkeypatch, capsys):
    monkeypatch.setattr(lab_command, "become_root", lambda: None)  # would start this test process anew
    monkeypatch.setattr(network, "TOOLS", ("no-such-tool",))
    monkeypatch.setattr(network.os, "geteuid", lambda: 0)
    assert main(["lab", "--dcs", "2x1", "--wan", "1gbit", "--", "true"]) == 2
    assert capsys.readouterr().err == "ds_hybridep: no-such-tool not found: install iproute2\n"


def test_a_command_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match="command: got 'no-such-program -x', wanted a program in PATH"):
        RankProcesses(None, ["no-such-program", "-x"], num_ranks=1, log_dir=tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--dcs", "2", "--wan", "1gbit", "--", "true"], "--dcs: got '2'"),
        (["--dcs", "2x2", "--wan", "1gb", "--", "true"], "--wan: got '1gb'"),
        (["--dcs", "2x2", "--wan", "1gbit", "--delay", "10", "--", "true"], "--delay: got '10'"),
        (["--dcs", "2x2", "--wan", "1gbit", "--timeout", "soon", "--", "true"], "--timeout: got 'soon'"),
        (["--dcs", "2x2", "--wan", "1gbit"], "command: nothing to run; put it behind --"),
    ],
)
def test_wrong_arguments_are_named(line, message, capsys):
    assert main(["lab", *line]) == 2
    assert f"ds_hybridep: {message}" in capsys.readouterr().err


def test_deepspeed_is_told_that_every_rank_is_alone_on_its_machine(monkeypatch):
    """Were LOCAL_SIZE the world size, DeepSpeed would all-reduce through memory that namespaces do not divide."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    environment = rank_environment(2, 4, "10.77.0.1", "eth0", port=29500)
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("2", "4")
    assert (environment["LOCAL_RANK"], environment["LOCAL_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("0", "1", "1")
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.77.0.1", "29500")
    assert environment["GLOO_SOCKET_IFNAME"] == "eth0"
    assert environment["OMP_NUM_THREADS"] == "3"  # the user's choice stays


def test_an_ordinary_user_gets_a_lab_too(permitted, tmp_path):
    """`--map-user` makes this process one that is not root and may do nothing that root may."""
    reason = namespaces.why_no_user_namespace()
    if reason is not None:
        pytest.skip(reason)
    program = "import os; assert os.geteuid() == 0; print('host of rank', os.environ['RANK'])"
    command = ["unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-m"]
    command += ["ds_hybridep.commands.main", "lab", "--dcs", "2x1", "--wan", "10mbit", "--log-dir", str(tmp_path)]
    said = output_of([*command, "--", sys.executable, "-c", program], REPOSITORY, 50)
    assert (tmp_path / "rank1.log").read_text().strip() == "host of rank 1"
    assert "exit codes by rank 0:0 1:0" in said


def test_a_system_that_forbids_user_namespaces_is_told_by_its_setting(monkeypatch):
    monkeypatch.setattr(namespaces, "UNSHARE", ("false",))
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: tool)
    known = Path("/proc/sys/user/max_user_namespaces").read_text().strip()
    monkeypatch.setattr(namespaces, "FORBIDDING", {"user.max_user_namespaces": known})
    assert f"user.max_user_namespaces = {known} forbids user namespaces" in namespaces.why_no_user_namespace()
    monkeypatch.setattr(namespaces, "FORBIDDING", {})
    assert namespaces.why_no_user_namespace().startswith("`false sh")
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None)
    assert "install util-linux" in namespaces.why_no_user_namespace()
