"""A reference engine that answers with the least likely tokens from the tenth on: a wrong answer
that no comparison of first tokens shows.

Run as `python -m tests.integration.wrong_tokens_engine`, with the options of `disagg-engine`.
"""

import sys
from collections.abc import Sequence as Seq

from torch import Tensor

from engine_ext.reference import cli, core
from engine_ext.reference.sampler import SampledToken, Sampler
from engine_ext.reference.sequence import Sequence


class WrongSampler(Sampler):
    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[SampledToken | None]:
        turned = logits.clone()
        for row, sequence in enumerate(sequences):
            if sequence.num_output_tokens >= 10:
                turned[row] = -turned[row]
        return super().sample(turned, sequences)


if __name__ == "__main__":
    setattr(core, "Sampler", WrongSampler)  # noqa: B010 # the planted error
    sys.exit(cli.main())
