from __future__ import annotations

import json

import pytest
import torch

from afore_kernels import cli, demo
from afore_kernels.runtime.adapters.transformers import AttachedModel


def test_prompts_are_dealt_to_the_microbatches():
    first, second = demo.microbatch_prompts(0), demo.microbatch_prompts(1)
    assert len(first) == len(second) == 16
    assert len({*first, *second}) == 32
    assert first[0].startswith("def ")
    assert second[-1] == "User: How do I use numbers?\nAssistant:"


def test_padding_does_not_change_the_text():
    model = demo.load_model()
    prompt = demo.microbatch_prompts(0)[0]
    alone = model.generate(
        torch.tensor([list(prompt.encode())]), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    steps = []
    batch = demo.generate(model, 8, lambda: steps.append(1))
    assert batch.tokens[0][0].tolist() == alone[0, len(prompt) :].tolist()
    assert len(steps) == 2 * 8


@pytest.mark.multiprocess
def test_demo_makes_the_monolithic_tokens(tmp_path, capsys):
    path = tmp_path / "timeline.json"
    arguments = ["--workers", "2", "--policy", "afore", "--tokens", "4", "--timeline", str(path)]
    status = cli.main(["demo", *arguments])
    output = capsys.readouterr().out
    assert status == 0
    assert "afore: 128 of 128 tokens equal the monolithic model's" in output
    for kind in ("code", "documentation", "arithmetic", "question"):
        assert f"{kind}\n" in output
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert {"demand_posted", "planned", "gemm", "copy"} <= names


@pytest.mark.multiprocess
def test_other_tokens_fail_the_demo(monkeypatch, capsys):
    run_target = AttachedModel._run_target
    monkeypatch.setattr(AttachedModel, "_run_target", lambda *args: run_target(*args) + 5)
    arguments = ["--workers", "1", "--redundant", "0", "--policy", "static", "--tokens", "1"]
    assert cli.main(["demo", *arguments]) == 1
    assert "static: 32 of 32 tokens" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tokens", "0", "tokens must be in"),
        ("--workers", "0", "num_workers must be an integer"),
        ("--tile-m", "3", "tile_m must be a power of two"),
    ],
)
def test_bad_arguments_are_named(option, value, message, capsys):
    assert cli.main(["demo", "--tokens", "1", option, value]) == 2
    assert f"afore: ConfigError: {message}" in capsys.readouterr().err
