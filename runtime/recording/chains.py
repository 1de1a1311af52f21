"""The panorama pass: what each draft would propose from every start of a recorded text.

What lies on the text comes from one teacher-forced pass. A draft leaves the text where its proposal
differs from it; what it proposes from there on depends on that position alone, so one branch per
disagreement is continued, all branches in one pass per depth: the text's keys and values are shared
and a mask keeps the branches apart. The values equal those that decoding computes: choices and
codes that rounding could change are decided by the same canonical pass as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from spectune.runtime.drafts.language_model import canonical_codes
from spectune.runtime.drafts.ngram import NgramIndex
from spectune.runtime.loading import LoadedPair
from spectune.runtime.models import CHUNK, CausalModel
from spectune.runtime.near_ties import choose, near_code
from spectune.runtime.recording.passes import Nodes, RecordedText
from spectune.runtime.sampling import entropy_of, log_distribution
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
            prefix = partial(self._prefix, read)
            tokens, log_q, *codes = self._decide(logits, lengths, prefix)
            parts.append((tokens.cpu().numpy(), *codes))
            following = ids[read : read + len(logits)]
            of_text.append(log_q[: len(following)].gather(-1, following[:, None])[:, 0])
            read += len(logits)
        proposals, logp, entropy = map(np.concatenate, zip(*parts, strict=True))
        return proposals, logp, entropy, torch.cat(of_text)

    def _prefix(self, read: int, row: int) -> list[int]:
        return self.text[: read + row]

    def _decide(
        self, logits: torch.Tensor, lengths: Sequence[int], prefix: Callable[[int], list[int]]
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
        """Proposals and codes of rows of logits, each row decided as decoding would decide it.
        ``lengths``: tokens that rows come after, ``prefix`` these tokens of a row."""
        model, sampling = self.model, self.sampling
        noise = None if self.noise is None else torch.stack([self.noise.row(n) for n in lengths])
        canonical = (lambda row: model.canonical(prefix(row))) if self.exact else None
        tokens = choose(logits, sampling, noise, canonical)
        log_q = log_distribution(logits, sampling)
        nats = -log_q.gather(-1, tokens[:, None])[:, 0]
        entropy = entropy_of(log_q)
        codes_p, codes_h = _codes(nats), _codes(entropy)
        if self.exact:
            near = near_code(nats, sampling) | near_code(entropy, sampling)
            for row in near.nonzero()[:, 0].tolist():
                decided = canonical_codes(model, prefix(row), int(tokens[row]), sampling)
                codes_p[row], codes_h[row] = decided
        return tokens, log_q, codes_p, codes_h

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
        positions = torch.tensor(outputs, device=model.device) + self.prompt
        tokens = torch.tensor(wrong, device=model.device)
        prefixes = [
            [*self.text[: self.prompt + at], token]
            for at, token in zip(outputs, wrong, strict=True)
        ]
        for j in range(self.gamma_max - 1):
            # A model's last position ends a branch; a decode under the budget never gets there.
            alive = [len(prefix) <= model.max_positions for prefix in prefixes]
            if not any(alive):
                break
            numbers = list(range(j * width, (j + 1) * width))
            above = [list(range(i, j * width, width)) for i in range(width)]
            logits = self.passes.nodes(Nodes(tokens, positions + j, numbers, above, outputs))
            lengths_now = [len(prefix) for prefix in prefixes]
            tokens, _, logp[:, j], entropy[:, j] = self._decide(
                logits, lengths_now, prefixes.__getitem__
            )
            lengths[alive] = j + 1
            for prefix, token in zip(prefixes, tokens.tolist(), strict=True):
                prefix.append(token)

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
