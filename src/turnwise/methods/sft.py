"""SFT: imitate written dialogues, or the successes of a stored run. The loss is the cross-entropy of the replies.

    L = - sum over the reply tokens of weight * log p

What the world says is context: it is never trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.credit.weights import Weighting, token_mean, weigh
from turnwise.methods.base import Lesson, MethodSetup, ReadDialogues
from turnwise.methods.options import Weighed
from turnwise.types import Datum


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """One dialogue to imitate; several datums where its history was rewritten."""

    datums: tuple[Datum, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sft:
    """Supervised fine-tuning on replies."""

    class Options(Weighed):
        """SFT: imitate written dialogues, or the successes of a stored run."""

        name: str = "sft"

        default_loss = "cross_entropy"
        data_options = ("dialogues", "world")
        only_stored = True

        def build(self, setup: MethodSetup) -> Sft:
            return Sft(source=ReadDialogues(path=setup.data.dialogues), weigh=self.weighting(setup))

    source: ReadDialogues
    weigh: Weighting = token_mean
    loss_fn: str = "cross_entropy"
    loss_config: Mapping[str, float | str] = field(default_factory=dict[str, float | str])

    def lessons(self, items: Sequence[Dialogue]) -> list[Lesson]:
        weighted = weigh([item.datums for item in items], self.weigh)
        return [Lesson(trajectory=None, advantages=(), datums=tuple(datums)) for datums in weighted]
