"""Streams are safe: no race in the workers' code in any schedule, and every planted one is found.

The long run is `pytest -m slow tests/runtime/test_stream_safety.py`: 10,000 schedules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from afore_kernels.runtime.lanes import TargetBuffers
from afore_kernels.runtime.migrator import Migrator
from afore_kernels.runtime.transports.local import OK
from afore_kernels.runtime.worker import FfnWorker
from tests.runtime.checked_tier import (
    WHOLE_MOE,
    CheckedRun,
    CheckedTarget,
    CheckedTier,
    Kinds,
    make_targets,
    triton_executor,
)

NUM_TARGETS, NUM_SEQUENCES = 7, 4
WORKER_COUNTS = (2, 3, 4)


@pytest.fixture(scope="module")
def tiers() -> Iterator[dict[int, CheckedTier]]:
    tiers = {num_workers: CheckedTier(num_workers) for num_workers in WORKER_COUNTS}
    yield tiers
    for tier in tiers.values():
        tier.close()


@pytest.fixture(scope="module")
def targets() -> dict[tuple[int, int], list[CheckedTarget]]:
    return {
        (num_workers, seed): make_targets(num_workers, NUM_TARGETS, seed)
        for num_workers in WORKER_COUNTS
        for seed in range(NUM_SEQUENCES)
    }


def check_schedules(tiers, targets, seeds) -> None:
    cases = itertools.cycle(targets)
    for seed, case in zip(seeds, cases):
        assert tiers[case[0]].run(targets[case], seed) == CheckedRun([], [], None), (case, seed)


def test_targets_copy_reuse_and_rebind(targets) -> None:
    """What the schedules run over is worth running: all that a slot can go through occurs."""
    num_copies = num_reuses = num_rebindings = num_first_uses = 0
    for sequence in targets.values():
        for before, after in itertools.pairwise(target.plan for target in sequence):
            is_used = after.slot_pairs > 0
            is_new = after.slot_copy == 1
            num_copies += int(is_new.sum())
            num_reuses += int((is_used & ~is_new).sum())
            was_copied_unused = (before.slot_copy == 1) & (before.slot_pairs == 0)
            num_first_uses += int((is_used & ~is_new & was_copied_unused).sum())
            num_rebindings += int((is_new & (before.slot_expert >= 0)).sum())
    assert min(num_copies, num_reuses, num_rebindings) >= 20
    assert num_first_uses >= 5


def test_no_race_and_right_results_in_random_schedules(tiers, targets) -> None:
    check_schedules(tiers, targets, range(60))


@pytest.mark.parametrize(
    ("num_workers", "options"), [(1, {}), (2, {}), (3, {"overlap_copies": False})]
)
def test_whole_layers_run_on_the_checking_device(num_workers, options) -> None:
    """Two layers with biases and a shared expert; copies that every target waits for."""
    tier = CheckedTier(num_workers, WHOLE_MOE, **options)
    for seed in range(4):
        targets = make_targets(num_workers, NUM_TARGETS, seed, WHOLE_MOE)
        assert num_workers == 1 or any(target.plan.slot_copy.any() for target in targets)
        assert tier.run(targets, seed) == CheckedRun([], [], None), seed
    tier.close()


def test_rejected_and_mismatched_targets_leave_the_others_right() -> None:
    tier = CheckedTier(2, WHOLE_MOE)
    for seed in range(4):
        # The rejected one is the last: plans after it would count on its copies.
        targets = make_targets(2, NUM_TARGETS, seed, WHOLE_MOE)
        targets[3], targets[-1] = targets[3].mismatched(), targets[-1].rejected()
        assert tier.run(targets, seed) == CheckedRun([], [], None), seed
        # What a test that cannot fail would not see.
        targets[3] = targets[3]._replace(outcome=OK)
        assert tier.run(targets, seed).wrong == [3]
    tier.close()


@pytest.mark.slow
def test_no_race_and_right_results_in_ten_thousand_schedules(tiers, targets) -> None:
    check_schedules(tiers, targets, range(10_000))


@pytest.mark.interpreter
def test_no_race_and_right_results_with_the_triton_executor(tiers, targets, kernel_device) -> None:
    if kernel_device != "cpu":
        pytest.skip("the checking device has host memory")
    kinds = Kinds(executor=triton_executor)
    for seed in range(2):
        assert tiers[2].run(targets[2, seed][:4], seed, kinds) == CheckedRun([], [], None), seed


class CopiesOverLiveWeights(Migrator):
    """Forgets what reads a slot."""

    def mark_used(self, plan, model_stream) -> None:
        pass


class NeverWaitsForCopies(Migrator):
    """Lets the model stream use a slot before its copy arrived."""

    def make_ready(self, plan, model_stream) -> None:
        pass


class WaitsForOwnCopiesOnly(Migrator):
    """Forgets a replica in flight that a later plan uses again."""

    def make_ready(self, plan, model_stream) -> None:
        if plan.slot_copy[self._worker].any():
            super().make_ready(plan, model_stream)


class RecordsCopiesEarly(Migrator):
    """Records a copy's event before the copy."""

    def submit(self, plan) -> int:
        before = self._stream.record_event()
        num_copies = super().submit(plan)
        for copy in plan.copies:
            if copy.worker == self._worker:
                self._copied[plan.target.layer, copy.slot] = before
        return num_copies


class MarksUseEarly(FfnWorker):
    """Records a slot's last use before the kernel that reads it."""

    def _run_experts(self, prepared) -> None:
        self._migrator.mark_used(prepared.plan, self._model_stream)
        mark_used, self._migrator.mark_used = self._migrator.mark_used, lambda *_: None
        super()._run_experts(prepared)
        self._migrator.mark_used = mark_used


class RebindsOnAnotherStream(Migrator):
    """Rebinds a slot while its last copy may still be running on another stream."""

    _other = None

    def submit(self, plan) -> int:
        if self._other is None:
            self._other = self._device._device.stream(f"second migration stream {self._worker}")
        self._stream, self._other = self._other, self._stream
        self._last_use.clear()
        return super().submit(plan)


class OverwritesLanes(TargetBuffers):
    """Stages a plan where queued kernels have yet to read the one before."""

    def claim_lane(self, plan):
        for lane in self._lanes:
            lane.replied = None
        return super().claim_lane(plan)


class RepliesEarly(FfnWorker):
    """Publishes a reply whose rows are not there yet."""

    def _publish_reply(self, prepared) -> None:
        self._completions.submit(lambda: self._reply(prepared), reads=[prepared.lane.status_name])
        prepared.lane.replied = self._completions.record_event()


class RepliesBeforeRowsAreWritten(FfnWorker):
    """Records the event of a reply before its rows are written."""

    def _write_reply(self, prepared) -> None:
        self._early = self._model_stream.record_event()
        super()._write_reply(prepared)

    def _publish_reply(self, prepared) -> None:
        record_event, self._model_stream.record_event = (
            self._model_stream.record_event,
            lambda: self._early,
        )
        super()._publish_reply(prepared)
        self._model_stream.record_event = record_event


FAULTS = {
    "copy into a slot that the previous target still reads": (
        Kinds(migrator=CopiesOverLiveWeights),
        "slot",
        {"submit", "_run_experts"},
    ),
    "use before arrival": (Kinds(migrator=NeverWaitsForCopies), "slot", {"submit", "_run_experts"}),
    "use before arrival through a later plan": (
        Kinds(migrator=WaitsForOwnCopiesOnly),
        "slot",
        {"submit", "_run_experts"},
    ),
    "copy's event recorded too early": (
        Kinds(migrator=RecordsCopiesEarly),
        "slot",
        {"submit", "_run_experts"},
    ),
    "last use recorded too early": (
        Kinds(worker=MarksUseEarly),
        "slot",
        {"submit", "_run_experts"},
    ),
    "slot rebound twice": (Kinds(migrator=RebindsOnAnotherStream), "slot", {"submit"}),
    "plan overwritten before its kernels ran": (
        Kinds(buffers=OverwritesLanes),
        "plan",
        {"_read_plan", "_partition"},
    ),
    "reply read before it is written": (Kinds(worker=RepliesEarly), "reply", {"_take"}),
    "reply slot reused early": (
        Kinds(worker=RepliesBeforeRowsAreWritten),
        "reply",
        {"_write_reply", "_take"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found_with_both_call_sites(tiers, targets, fault) -> None:
    kinds, buffer_kind, functions = FAULTS[fault]
    races = []
    for seed in range(12):
        found = tiers[3].run(targets[3, seed % NUM_SEQUENCES], seed, kinds)
        races += [race for race in found.races if race.buffer.kind == buffer_kind]
    assert races
    sites = {
        frozenset(access.call_site.rsplit(" in ", 1)[1] for access in (race.first, race.second))
        for race in races
    }
    assert any(functions <= site for site in sites), sites
