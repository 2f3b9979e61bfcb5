"""The settings of one demo run: everything that two equal runs must have in common.

Apart from the modules that use it because processes without torch read it too. The values are
the result of trials: a learning rate of 5e-4 undoes what the warm-up taught, 2e-4 adds to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from ckptstore.errors import InvalidInputError

MAY_BE_ZERO = ("seed", "warm_up_steps", "kl")
LAYERS = 3  # one of each kind of attention; the first routes by hash, the others by top-k


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What a run does and with how many processes.

    `steps` counts optimizer updates after the warm-up; a checkpoint is made every `every` of them,
    an evaluation every `evaluate_every`, both also at the last. A step trains on `prompts` groups of
    `samples` completions each; an engine generates `lease_prompts` consecutive prompts in one
    batch, and never another number (a row's logits depend on its batch).
    """

    seed: int = 0
    steps: int = 75
    every: int = 5
    evaluate_every: int = 5
    trainers: int = 2
    rollouts: int = 2
    prompts: int = 32
    samples: int = 8
    lease_prompts: int = 8

    warm_up_steps: int = 40
    warm_up_rows: int = 256
    warm_up_rate: float = 2e-3
    learning_rate: float = 2e-4
    clip_norm: float = 1.0
    ratio_clip: float = 0.2
    kl: float = 0.005
    evaluation_rows: int = 200

    hidden: int = 128
    expert_width: int = 128
    query_rank: int = 64
    experts: int = 8
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            lowest = 0 if field.name in MAY_BE_ZERO else 1 if field.type == "int" else 1e-12
            if not lowest <= value < 2**63:
                raise InvalidInputError(
                    f"{field.name} is {value}, but must be at least {lowest}; choose another value",
                    name=field.name,
                    value=value,
                )
        if self.prompts % self.lease_prompts:
            raise InvalidInputError(
                f"{self.prompts} prompts a step cannot be cut into leases of {self.lease_prompts}; "
                f"choose a multiple of {self.lease_prompts}",
                prompts=self.prompts,
                lease_prompts=self.lease_prompts,
            )
        widest = max(self.trainers, self.experts_per_token)
        if widest > min(self.experts, self.prompts):
            raise InvalidInputError(
                f"{self.trainers} trainers and {self.experts_per_token} experts a token do not fit "
                f"{self.experts} experts and {self.prompts} prompts; choose fewer",
                trainers=self.trainers,
                experts=self.experts,
            )

    def to_json(self) -> dict[str, int | float]:
        """Give the fields as plain numbers, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, int | float]) -> DemoConfig:
        """Build from `to_json`'s output; an unknown field is an InvalidInputError."""
        unknown = sorted(set(value) - {field.name for field in fields(cls)})
        if unknown:
            raise InvalidInputError(
                f"unknown settings {', '.join(unknown)}; remove them or upgrade ckptstore", unknown=unknown
            )
        return cls(**value)  # type: ignore[arg-type]  # checked by __post_init__
