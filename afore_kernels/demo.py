"""`afore demo`: a tiny MoE model generates text, alone and with its experts in a tier.

Two microbatches are in flight, each driven by its own thread; both hold prompts of four kinds of
text, because the experts a router picks shift with the kind. The model runs in float32 although its
file is fp16: rounding is then too small to change a greedy choice, so every run must make the same
tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
import transformers
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.text import Text

from afore_kernels.config import PolicyName, TierConfig
from afore_kernels.errors import ConfigError
from afore_kernels.report import comparison_table, summarise
from afore_kernels.runtime.adapters.transformers import attach

MODEL = Path(__file__).parent / "data" / "tiny-glm-moe"
NUM_MICROBATCHES = 2
MAX_TOKENS = 512
_POLICIES = {"both": ("static", "afore"), **{name: (name,) for name in get_args(PolicyName)}}

_PROMPTS = {
    "code": (
        'def {}:\n    """',
        "read_file(path) main() sort(items) parse(text) get(key) is_valid(name) run() close(self)",
    ),
    "documentation": (
        'The "{}" statement is used to',
        "with for while try import return assert global",
    ),
    "arithmetic": (
        "Ana has {} apples and buys 7 more. How many apples",
        "12 30 8 21 45 3 17 50",
    ),
    "question": (
        "User: How do I use {}?\nAssistant:",
        "lambda import class dictionaries slicing with strings numbers",
    ),
}
"""By kind of text: a form, and what to put into it."""

Advance = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Generation:
    """New tokens of each microbatch, int64 [num_prompts, num_tokens], and how fast they came."""

    tokens: list[torch.Tensor]
    tokens_per_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    add = parser.add_argument
    add("--workers", type=int, default=4, help="FFN workers N (default: %(default)s)")
    add("--redundant", type=int, default=2, help="redundant slots R (default: %(default)s)")
    add("--tokens", type=int, default=32, help="new tokens per prompt (default: %(default)s)")
    add("--policy", choices=_POLICIES, default="both", help="default: %(default)s")
    add("--tile-m", type=int, default=4, help="pairs per tile (default: %(default)s)")
    add("--timeline", metavar="FILE", help="write the last policy's timeline for Perfetto")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0, or 1 if a tier made other tokens than the monolithic model.

    Raises:
        AforeError: if an argument is not valid or the tier failed.
    """
    if not 1 <= args.tokens <= MAX_TOKENS:
        raise ConfigError(f"tokens must be in [1, {MAX_TOKENS}], got {args.tokens}")
    policies = _POLICIES[args.policy]
    tiers = {
        policy: TierConfig(num_workers=args.workers, redundant_slots=args.redundant, policy=policy)
        for policy in policies
    }
    console = Console()
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    summaries, generations = {}, {}
    with Progress(*columns, console=console, transient=True) as progress, _one_thread():

        def track(what: str) -> Advance:
            task = progress.add_task(what, total=NUM_MICROBATCHES * args.tokens)
            return lambda: progress.advance(task)

        model = load_model()
        expected = generate(model, args.tokens, track("monolithic"))
        for policy, tier in tiers.items():
            advance = track(f"{policy}, {args.workers} workers")
            with attach(model, tier, tile_m=args.tile_m) as attached:
                generations[policy] = generate(model, args.tokens, advance, attached.microbatch)
                timeline = attached.tier.timeline()
            summaries[policy] = summarise(timeline.per_target)
            if args.timeline is not None and policy == policies[-1]:
                timeline.write(args.timeline)

    _show_texts(console, generations[policies[-1]])
    num_tokens = sum(tokens.numel() for tokens in expected.tokens)
    num_equal = {
        policy: sum(int((a == b).sum()) for a, b in zip(generation.tokens, expected.tokens))
        for policy, generation in generations.items()
    }
    for policy, equal in num_equal.items():
        console.print(f"{policy}: {equal} of {num_tokens} tokens equal the monolithic model's")
    console.print(
        comparison_table(summaries, {name: g.tokens_per_s for name, g in generations.items()})
    )
    console.print(
        f"monolithic: {expected.tokens_per_s:.0f} tokens/s. The tier's processes share the model's "
        "cores: its rate\nshows the cost of the hand-over, not the gain of disaggregation.",
        soft_wrap=True,
    )
    return 0 if set(num_equal.values()) == {num_tokens} else 1


def load_model() -> transformers.PreTrainedModel:
    """Load the packaged model in float32."""
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, local_files_only=True
    )


def microbatch_prompts(microbatch: int) -> list[str]:
    """Prompts of one microbatch: of each kind every `NUM_MICROBATCHES`-th, kind by kind."""
    return [
        form.format(subject)
        for form, subjects in _PROMPTS.values()
        for subject in subjects.split()[microbatch::NUM_MICROBATCHES]
    ]


def generate(
    model: transformers.PreTrainedModel,
    num_tokens: int,
    advance: Advance,
    enter_microbatch: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> Generation:
    """Continue all prompts greedily, every microbatch on its own thread.

    Args:
        model: monolithic or attached.
        num_tokens: new tokens per prompt.
        advance: called after each step of each microbatch.
        enter_microbatch: context in which the model runs a microbatch.
    """

    def after_step(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        advance()
        return scores

    def generate_microbatch(microbatch: int) -> torch.Tensor:
        prompts = [list(prompt.encode()) for prompt in microbatch_prompts(microbatch)]
        length = max(map(len, prompts))
        with enter_microbatch(microbatch):
            tokens: torch.Tensor = model.generate(  # padded on the left
                torch.tensor([[0] * (length - len(p)) + p for p in prompts]),
                attention_mask=torch.tensor(
                    [[0] * (length - len(p)) + [1] * len(p) for p in prompts]
                ),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                logits_processor=[after_step],
            )
        return tokens[:, length:]

    start = time.monotonic()
    with ThreadPoolExecutor(NUM_MICROBATCHES) as threads:
        tokens = list(threads.map(generate_microbatch, range(NUM_MICROBATCHES)))
    elapsed_s = time.monotonic() - start
    return Generation(tokens, sum(t.numel() for t in tokens) / elapsed_s)


def _show_texts(console: Console, generation: Generation) -> None:
    """Print the first prompt of each kind with its continuation."""
    prompts, tokens = microbatch_prompts(0), generation.tokens[0]
    prompts_per_kind = len(prompts) // len(_PROMPTS)
    for kind, index in zip(_PROMPTS, range(0, len(prompts), prompts_per_kind)):
        continuation = bytes(tokens[index].tolist()).decode(errors="replace")
        text = Text.assemble((f"{kind}\n", "bold"), prompts[index], (continuation, "green"))
        console.print(text, soft_wrap=True)
    console.print()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to one thread: these matrices are small, and the workers need the other cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
