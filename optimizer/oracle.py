"""The plain loop over a recorded trace: slow, obvious, and what the fast replay must agree with round by round."""

from __future__ import annotations

import numpy as np

from runtime.drafts.protocol import Drafted
from runtime.loop import DecodeRequest, Round, StaticSource, Verified, decode_rounds
from runtime.policies.document import Policy
from runtime.policies.plan import Plan
from runtime.policies.stops import STOP_NONE, should_stop
from runtime.session import Sessions
from traces.errors import TraceError
from traces.schema import AGREE_NO, AGREE_NONE, AGREE_YES, ChainPanorama, Trajectory, request_seed


class TraceBackend:
    """The loop's backend over one trajectory and one draft's panorama: proposals and verdicts are looked up, not computed.

    Raises TraceError when a stop would read beyond the window that was recorded.
    """

    canonical_passes = 0

    def __init__(self, trajectory: Trajectory, panorama: ChainPanorama | None) -> None:
        self.output = trajectory.output_ids.tolist()
        self.panorama = panorama
        self._at = 0
        self._lag = 1
        self._accepted = 0
        if panorama is not None:
            self._branch = np.cumsum(panorama.agree == AGREE_NO) - 1

    def choose(self, request: DecodeRequest, prepared: Plan) -> Plan:
        assert prepared.chooser is not None
        return prepared.chooser.of_recorded(request.prompt_ids, request.max_new_tokens, request.sampling)

    def begin(self, request: DecodeRequest, prepared: Plan) -> None:
        self._at, self._lag = 0, 1

    def _codes(self, start: int, j: int, reads: bool) -> tuple[int, int, int]:
        """(agreement, -log q code, entropy code) of the j-th proposal of the chain from ``start``; agreement counts along the chain."""
        view = self.panorama
        assert view is not None
        length = len(self.output)
        run = 0
        while start + run < length and view.agree[start + run] == AGREE_YES:
            run += 1
        position = start + j
        if j < run:
            return AGREE_YES, int(view.logp[position]), int(view.entropy[position])
        if start + run < length:
            if j == run:
                return int(view.agree[position]), int(view.logp[position]), int(view.entropy[position])
            row, entry = int(self._branch[start + run]), j - run - 1
        else:
            row, entry = len(view.branch_len) - 1, j - run
        recorded = view.gamma_max - int(start + run < length)
        if entry >= recorded and view.branch_len[row] == recorded:
            if reads or view.draft == "ngram":
                raise TraceError(
                    f"the panorama of draft {view.draft!r} holds windows up to {view.gamma_max}; record with --gamma-max {j + 1}"
                )
            return AGREE_NO, 0, 0
        if entry >= view.branch_len[row]:
            return AGREE_NONE, 0, 0
        return AGREE_NO, int(view.branch_logp[row, entry]), int(view.branch_entropy[row, entry])

    def draft(self, prepared: Plan, gamma: int, limit: int | None = None) -> Drafted:
        if self.panorama is None or self.panorama.draft != prepared.policy.draft:
            raise TraceError(f"this recording has no panorama of draft {prepared.policy.draft!r}")
        stop = prepared.stop
        count = steps = joint = accepted = 0
        for j in range(gamma):
            steps += 1
            agree, logp, entropy = self._codes(self._at, j, stop.kind != STOP_NONE)
            if agree == AGREE_NONE:
                break
            joint += logp
            ended = should_stop(stop.kind, stop.max_logp_code, stop.max_joint_code, stop.max_entropy_code, logp, joint, entropy)
            if ended and not stop.keep_last:
                break
            count += 1
            accepted += int(agree == AGREE_YES and accepted == j)
            if ended:
                break
        self._accepted = accepted
        return Drafted(count, steps, self._lag)

    def verify(self, drafted: Drafted | None) -> Verified:
        accepted = self._accepted if drafted else 0
        return Verified(accepted, self.output[self._at : self._at + accepted + 1])

    def commit(self, emitted: list[int], accepted: int, drafted: Drafted | None) -> None:
        if drafted is not None and drafted.steps:
            self._lag = len(emitted) - min(accepted, drafted.steps - 1)
        else:
            self._lag += len(emitted)
        self._at += len(emitted)


def replay_rounds(
    trajectory: Trajectory, panorama: ChainPanorama | None, policy: Policy, prepared: Plan, sessions: Sessions | None = None
) -> list[Round]:
    """Every round of one request under one policy, by the plain loop. ``sessions`` hold what windows carry on."""
    length = len(trajectory.output_ids)

    def ends_at(output: list[int], new: list[int]) -> int | None:
        return length - len(output) if len(output) + len(new) >= length else None

    request = DecodeRequest(
        id=trajectory.request_id,
        prompt_ids=trajectory.prompt_ids.tolist(),
        sampling=trajectory.sampling,
        seed=request_seed(trajectory.sampling.seed, trajectory.request_id),
        max_new_tokens=trajectory.max_new_tokens,
        ends_at=ends_at,
    )
    backend = TraceBackend(trajectory, panorama if policy.speculates else None)
    return list(decode_rounds(backend, request, StaticSource(prepared), sessions=sessions))
