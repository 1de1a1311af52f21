"""The panorama pass: what each draft would propose from every start of a recorded text.

What lies on the text comes from one teacher-forced pass. A draft leaves the text where its proposal
differs from it; what it proposes from there on depends on that position alone, so one branch per
disagreement is continued, all branches in one pass per depth: the text's keys and values are shared
and a mask keeps the branches apart. The values equal those that decoding computes, as far as
rounding leaves passes of different shapes equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from spectune.runtime.drafts.ngram import NgramIndex
from spectune.runtime.loading import LoadedPair
from spectune.runtime.models import CHUNK, CausalModel
from spectune.runtime.recording.passes import Nodes, RecordedText
from spectune.runtime.sampling import entropy_of, log_distribution, sample
from spectune.traces.schema import (
    AGREE_NO,
    AGREE_NONE,
    AGREE_YES,
    NAT_CODE_MAX,
    NAT_SCALE,
    PROB_SCALE,
    ChainPanorama,
    Trajectory,
)

BRANCHES = 128
"""Rows decided and branches continued together; more are taken in groups, so that distributions and
masks stay small."""


def record_panorama(
    pair: LoadedPair, trajectory: Trajectory, draft: str, gamma_max: int
) -> ChainPanorama:
    """The chain panorama of one draft over one trajectory, recorded now or long ago ("retrace").

    ``draft`` is one of the pair's or ``ngram``. Acceptance probabilities for the rejection verifier
    cost one pass of the target, at temperature > 0 only.
    """
    if draft == "ngram":
        return _ngram_panorama(trajectory, gamma_max)
    return _Pass(pair, trajectory, draft, gamma_max).run()


class _Pass(RecordedText):
    def __init__(
        self, pair: LoadedPair, trajectory: Trajectory, draft: str, gamma_max: int
    ) -> None:
        super().__init__(pair, trajectory, draft)
        self.pair, self.draft, self.gamma_max = pair, draft, gamma_max
        self.model: CausalModel = pair.drafts[draft]

    def run(self) -> ChainPanorama:
        count = len(self.output)
        proposals, logp, entropy, log_q_text = self._on_text()
        agree = proposals[:count] == np.array(self.output)
        # Where the draft leaves the text, and behind its end.
        starts = np.append(np.flatnonzero(~agree), count)
        rows_logp = np.zeros((len(starts), self.gamma_max), dtype=np.uint16)
        rows_entropy = np.zeros_like(rows_logp)
        lengths = np.zeros(len(starts), dtype=np.uint8)
        for first in range(0, len(starts), BRANCHES):
            rows = slice(first, first + BRANCHES)
            some, codes = starts[rows], (rows_logp[rows], rows_entropy[rows], lengths[rows])
            self._continue(some.tolist(), proposals[some].tolist(), *codes)
        # The last row's first entry is the proposal right after the text; its continuation follows.
        rows_logp[-1, 1:] = rows_logp[-1, :-1]
        rows_entropy[-1, 1:] = rows_entropy[-1, :-1]
        rows_logp[-1, 0], rows_entropy[-1, 0] = logp[count], entropy[count]
        lengths[-1] = min(self.gamma_max, int(lengths[-1]) + 1)
        return ChainPanorama(
            draft=self.draft,
            gamma_max=self.gamma_max,
            agree=np.where(agree, AGREE_YES, AGREE_NO).astype(np.uint8),
            logp=logp[:count],
            entropy=entropy[:count],
            accept=self._accept(agree, log_q_text),
            branch_logp=rows_logp,
            branch_entropy=rows_entropy,
            branch_len=lengths,
        )

    def _on_text(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]:
        """Proposals [L + 1], codes of them and of the entropies [L + 1], and log q of the text's
        tokens [L]."""
        ids, read = torch.tensor(self.text, device=self.model.device), self.prompt
        parts, of_text = [], []
        chunks = self.passes.roots()
        for logits in (rows for chunk in chunks for rows in torch.split(chunk, BRANCHES)):
            lengths = range(read, read + len(logits))
            tokens, log_q, *codes = self._propose(logits, lengths)
            parts.append((tokens.cpu().numpy(), *codes))
            following = ids[read : read + len(logits)]
            of_text.append(log_q[: len(following)].gather(-1, following[:, None])[:, 0])
            read += len(logits)
        proposals, logp, entropy = map(np.concatenate, zip(*parts, strict=True))
        return proposals, logp, entropy, torch.cat(of_text)

    def _propose(
        self, logits: torch.Tensor, lengths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
        """Proposals, log q, and codes of rows of logits, which come after ``lengths`` tokens."""
        sampling, log_q = self.sampling, log_distribution(logits, self.sampling, draft=True)
        tokens = sample(logits, sampling, self.noise, lengths, draft=True)
        nats = -log_q.gather(-1, tokens[:, None])[:, 0]
        return tokens, log_q, _codes(nats), _codes(entropy_of(log_q))

    def _continue(
        self,
        outputs: list[int],
        wrong: list[int],
        logp: np.ndarray,
        entropy: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        """Continues branches, which leave the text after so many output tokens with these ones, by
        gamma_max - 1 proposals each, writing entry j for the one after 1 + j tokens off the text.
        """
        model, width = self.model, len(outputs)
        first = np.array(outputs) + self.prompt + 1  # tokens before each branch's proposal
        positions = torch.tensor(outputs, device=model.device) + self.prompt
        tokens = torch.tensor(wrong, device=model.device)
        for j in range(self.gamma_max - 1):
            # A model's last position ends a branch; a decode under the budget never gets there.
            alive = first + j <= model.max_positions
            if not alive.any():
                break
            numbers = list(range(j * width, (j + 1) * width))
            above = [list(range(i, j * width, width)) for i in range(width)]
            logits = self.passes.nodes(Nodes(tokens, positions + j, numbers, above, outputs))
            tokens, _, logp[:, j], entropy[:, j] = self._propose(logits, (first + j).tolist())
            lengths[alive] = j + 1

    def _accept(self, agree: np.ndarray, log_q_text: torch.Tensor) -> np.ndarray:
        """min(1, q(x) / p(x)) of the text's tokens, in 1/65535."""
        if self.sampling.greedy:
            return np.where(agree, PROB_SCALE, 0).astype(np.uint16)
        target, total = self.pair.target, len(self.text)
        target.reserve(total + 1)
        ids = torch.tensor(self.text, device=target.device)
        target.read(ids[: self.prompt - 1], 0)
        ratios = []
        for at in range(self.prompt - 1, total - 1, CHUNK):
            part = ids[at : min(at + CHUNK, total - 1)]
            log_p = log_distribution(target.chain(part, at, logits=len(part))[0], self.sampling)
            of_text = log_p.gather(-1, ids[at + 1 : at + 1 + len(part)][:, None])[:, 0]
            ratios.append(
                (log_q_text[at - self.prompt + 1 :][: len(part)] - of_text).exp().clamp(0, 1)
            )
        return (torch.cat(ratios) * PROB_SCALE).round().cpu().numpy().astype(np.uint16)


def _codes(nats: torch.Tensor) -> np.ndarray:
    return (nats * NAT_SCALE).clamp(0, NAT_CODE_MAX).cpu().numpy().astype(np.uint16)


def _ngram_panorama(trajectory: Trajectory, gamma_max: int) -> ChainPanorama:
    index = NgramIndex()
    index.extend(trajectory.prompt_ids.tolist())
    output = trajectory.output_ids.tolist()
    agree = np.zeros(len(output), dtype=np.uint8)
    lengths: list[int] = []
    for i, token in enumerate(output):
        proposal = index.propose()
        agree[i] = AGREE_NONE if proposal is None else AGREE_YES if proposal == token else AGREE_NO
        if proposal is not None and proposal != token:
            lengths.append(len(index.continuation(gamma_max)) - 1)
        index.extend([token])
    lengths.append(len(index.continuation(gamma_max)))
    zeros = np.zeros(len(output), dtype=np.uint16)
    rows = np.zeros((len(lengths), gamma_max), dtype=np.uint16)
    return ChainPanorama(
        draft="ngram",
        gamma_max=gamma_max,
        agree=agree,
        logp=zeros,
        entropy=zeros.copy(),
        accept=np.where(agree == AGREE_YES, PROB_SCALE, 0).astype(np.uint16),
        branch_logp=rows,
        branch_entropy=rows.copy(),
        branch_len=np.array(lengths, dtype=np.uint8),
    )
