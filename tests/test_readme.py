"""The README: its code blocks run as they stand, and its links and paths lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def run_block(index: int) -> dict[str, Any]:
    """Execute a code block of the README and return its names."""
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[index], f"README.md, code block {index}", "exec"), names)
    return names


def test_every_code_block_has_a_test() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.multiprocess
def test_tier_example_computes_the_layer() -> None:
    from afore_kernels import moe_ffn
    from afore_kernels.testing import assert_close

    names = run_block(0)
    moe = names["moe"]
    experts = [
        names["RandomWeights"](moe).expert(names["target"].layer, expert)
        for expert in range(moe.num_experts)
    ]
    expected = moe_ffn(
        names["hidden"],
        names["expert_ids"],
        names["scores"],
        torch.stack([expert.gate_up for expert in experts]),
        torch.stack([expert.down for expert in experts]),
        activation=moe.activation,
    )
    assert_close(names["output"], expected, torch.float32)


@pytest.mark.multiprocess
def test_transformers_example_makes_the_monolithic_tokens() -> None:
    pytest.importorskip("transformers")
    names = run_block(1)
    alone = names["model"].generate(
        names["prompt"], max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    assert names["tokens"].tolist() == alone.tolist()


def test_quantised_example_computes_its_own_values() -> None:
    from afore_kernels import moe_ffn
    from afore_kernels.testing import assert_close

    names = run_block(2)
    expected = moe_ffn(
        names["hidden"],
        names["expert_ids"],
        names["scores"],
        *(
            names["ExpertWeight"].down(*names[name], format="mxfp4").as_rows(torch.bfloat16)
            for name in ("gate_up", "down")
        ),
        activation=names["Activation"](),
    )
    assert_close(names["output"], expected, torch.bfloat16)


def test_commands_exist() -> None:
    from afore_kernels.cli import COMMANDS

    assert set(re.findall(r"`afore ([a-z]+)", README)) == set(COMMANDS)


def test_links_and_benchmarks_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    benchmarks = [f"bench/{name}.py" for name in re.findall(r"python -m bench\.(\w+)", README)]
    paths = [*links, *benchmarks]
    assert links
    assert benchmarks
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_extras_exist() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(re.findall(r"`\.\[(\w+)\]`", README))
    assert named
    assert named <= set(project["optional-dependencies"])
