"""Check whether a configuration fits its GPUs: a row for each role and each use of a shared GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slurm_rlhf.config.roles import ROLES, ROLLOUT, has_engines, roles_by_slots
from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement.engine_memory import GIB, Engine
from slurm_rlhf.placement.rank_memory import Models, RankMemory, rank_memories, save_copies, the_engine


@dataclass(frozen=True, slots=True)
class Row:
    """Describe what one GPU holds at one time."""

    name: str  # a role, or the use of a shared GPU
    ranks: int  # of the role; 0 for a GPU shared by several
    terms: tuple[tuple[str, int], ...]  # (what, bytes), largest first
    there: int  # bytes of the GPU; 0 where others share it, and for rows of a part
    role: str  # whose work it is

    @property
    def needed(self) -> int:
        return sum(size for _, size in self.terms)

    @property
    def fits(self) -> bool:
        return not self.there or self.needed <= self.there

    @property
    def together(self) -> bool:
        """Tell whether several roles share the GPU; then each term begins with the name of its role."""
        return self.ranks == 0

    @property
    def by_role(self) -> dict[str, int]:
        """Return the bytes of each role on a shared GPU, the largest first."""
        sums: dict[str, int] = {}
        for what, size in self.terms:
            role = what.partition("'s ")[0]
            sums[role] = sums.get(role, 0) + size
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True)
class Account:
    """Hold the memory of a run."""

    gpu: int  # bytes
    rows: tuple[Row, ...]
    engine: Engine | None  # None: the actor's ranks sample (rollout.engine = hf)
    wanted: int  # sequences that an engine gets at once
    copies: dict[str, int]  # role -> bytes of host memory of a rank, for ckpt.async_save

    @property
    def holds_a_sequence(self) -> bool:
        """Tell whether the KV cache of an engine is large enough for one; True where there is no engine."""
        return self.engine is None or self.engine.sequences >= 1

    def fits(self, role: str = "") -> bool:
        """Tell whether `role` always fits, or every role; an engine's KV cache must hold a whole sequence, too."""
        rows = [row for row in self.rows if not role or row.role == role]
        return all(row.fits for row in rows) and (role not in ("", ROLLOUT) or self.holds_a_sequence)


def account(config: Config, models: Models, gpu: int) -> Account:
    """Estimate the memory of a run with `config` on GPUs of `gpu` bytes."""
    held = rank_memories(config, models, gpu)
    rows: list[Row] = []
    for group in roles_by_slots(config, list(held)):
        shared = len(group) > 1
        for role in group:
            rows.append(_row(role, held[role].worst(), 0 if shared else gpu, role, ROLES[role].ranks(config)))
        if shared:
            rows += _together(config, [held[role] for role in group], gpu)
    rank = the_engine(config, models[ROLLOUT], gpu) if has_engines(config) else None
    return Account(gpu, tuple(rows), rank, wanted_sequences(config), save_copies(config, models))


def wanted_sequences(config: Config) -> int:
    """Count the sequences that an engine works on at once, with its share of the prompts of a step."""
    responses = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    return min(config.vllm.max_num_seqs, -(-responses // config.vllm.num_engines))


def _together(config: Config, held: list[RankMemory], gpu: int) -> Iterator[Row]:
    """List the uses of a shared GPU. With train.colocate_all one role works at a time, else all may."""
    if not config.train.colocate_all:
        worker, others = held[0], held[1:]
        occasions = []
        for phase in worker.phases:
            terms = _named(worker, phase)
            for other in others:
                terms |= _named(other, "forward" if phase == "forward" else "")
            occasions.append(_row(f"  together: {phase}", terms, gpu, worker.role))
        yield max(occasions, key=lambda row: row.needed)
        return
    engine = next((one for one in held if one.role == ROLLOUT), None)
    trainers = [one for one in held if one.role != ROLLOUT]
    if engine is not None:
        awake = _named(engine, "generation")
        for other in trainers:
            awake |= _named(other, "parked")
        yield _row("  together: generation", awake, gpu, ROLLOUT)
    for one in trainers:
        worst = max(one.phases, key=lambda phase: sum(one.at(phase).values()))
        terms = _named(engine, "") if engine is not None else {}
        for other in trainers:
            terms |= _named(other, worst if other is one else "")
        yield _row(f"  together: {one.role} {worst}", terms, gpu, one.role)


def _named(holding: RankMemory, phase: str) -> dict[str, int]:
    return {f"{holding.role}'s {name}": size for name, size in holding.at(phase).items()}


def _row(name: str, terms: dict[str, int], there: int, role: str, ranks: int = 0) -> Row:
    largest = sorted(((what, size) for what, size in terms.items() if size), key=lambda item: -item[1])
    return Row(name, ranks, tuple(largest), there, role)


def gib(size: float) -> str:
    """Write bytes in GiB: `12.3`."""
    return f"{size / GIB:.1f}"
