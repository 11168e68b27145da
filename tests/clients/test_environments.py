# SPDX-License-Identifier: Apache-2.0
"""What is said where the environment of a program cannot be made."""

from pathlib import Path

import clients
import pytest

pytestmark = [pytest.mark.clients, pytest.mark.slow]


def test_what_is_missing_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "FOLDER", tmp_path)
    monkeypatch.setattr(clients, "TORCH", f"{tmp_path}/torch-2.13.0-py3-none-any.whl")
    client = clients.Client(name="any", packages=("peft==0.18.1",))
    with pytest.raises(pytest.fail.Exception) as failed:
        client.make()
    (line,) = str(failed.value).splitlines()
    assert f"{tmp_path}/any has no environment with {clients.TORCH} and peft==0.18.1, because" in line
    assert "No such file" in line
    assert not (tmp_path / "any" / "made-of.json").exists()
