"""A deployment: a name under which one policy is in force for a pair and device, and the sampling
it was tuned for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spectune.engines.abilities import ENGINES
from spectune.traces.errors import ConfigError, PolicyError
from spectune.traces.store.publications import DEFAULT_DEPLOYMENT
from spectune.traces.text import shortened

if TYPE_CHECKING:
    from spectune.runtime.policies.document import Policy
    from spectune.traces.schema import Sampling, Verifier
    from spectune.traces.tables import Publication, Trajectory


@dataclass(frozen=True)
class Place:
    """Where a policy is put in force: on a device, in a deployment of an ``engine``, in place of
    the publication ``over`` (None: nothing was published there). ``serves``: what a server that
    runs drafts now; None: not known. The native decoder drafts nothing without a publication, a
    server of another engine what it was started with."""

    device: str
    deployment: str
    over: Publication | None
    serves: Policy | None = None
    engine: str = "native"

    def stays(self, unusable: str) -> str:
        """What goes on where nothing is proved. ``unusable``: why what is published cannot run;
        empty where it can."""
        if self.over is not None and not unusable:
            return "the incumbent stays"
        if self.serves is not None:
            return "what the server drafts stays"
        if self.engine == "native":
            return "decoding without a draft stays"
        return f"nothing is published, and servers of {self.deployment} go on as they were started"

    @property
    def otherwise(self) -> str:
        """What is the incumbent where what is published cannot run."""
        if self.serves is not None:
            return "what the server drafts is the incumbent"
        what = "autoregression" if self.engine == "native" else "no speculation"
        return f"{what} is the incumbent"

    def reference(self, unusable: str) -> str:
        """What it is compared with where it is not known what the deployment does; else empty."""
        known = (self.over is not None and not unusable) or self.serves is not None
        if known or self.engine == "native":
            return ""
        return (
            f"what servers of deployment {self.deployment} draft by themselves is not known: this "
            "compares with a server without a draft"
        )


def check_server(url: str | None, folder: str | None) -> None:
    """Raises ConfigError where the options of a server that runs do not fit together."""
    if not (url and folder):
        raise ConfigError(
            "--url and --folder go together: the server's URL, and the folder that its "
            "SPECTUNE_FOLDER names"
        )


def deployment_of(engine: str) -> str:
    """The deployment that an engine follows where no other is named: the one of its name, and for
    the native decoder the default."""
    return DEFAULT_DEPLOYMENT if engine == "native" else engine


def refusal(deployment: str, policy: Policy) -> str:
    """Why the engine whose deployment it is cannot run a policy; empty where it can, and where no
    engine has the deployment's name."""
    try:
        if deployment in ENGINES:
            ENGINES[deployment].runs(policy)
    except PolicyError as error:
        return f"deployment {deployment}: {error}"
    return ""


def tuned_for(sampling: Sampling, verifier: Verifier) -> dict[str, Any]:
    """What a publication says of the sampling that it was tuned for: all but the seed."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "verifier": verifier,
    }


def sampling_of(trajectories: Iterable[Trajectory]) -> dict[str, Any] | None:
    """What all of some texts were sampled with (:func:`tuned_for`); None where they differ."""
    samplings = [tuned_for(t.sampling, t.verifier) for t in trajectories]
    return samplings[0] if samplings and samplings.count(samplings[0]) == len(samplings) else None


def other_sampling(publication: Publication | None, sampling: Sampling, verifier: Verifier) -> str:
    """A line on a policy that is used under another sampling than it was tuned for; empty where it
    is not, or that is not known. At temperature 0 nothing else of the sampling matters."""
    if publication is None or publication.sampling is None:
        return ""
    then, now = publication.sampling, tuned_for(sampling, verifier)
    if now["temperature"] == then.get("temperature") == 0:
        return ""
    changed = [key for key, value in now.items() if key in then and then[key] != value]
    if not changed:
        return ""
    was, here = (
        ", ".join(f"{key.replace('_', '-')} {shortened(str(values[key]))}" for key in changed)
        for values in (then, now)
    )
    return (
        f"version {publication.version} of deployment {publication.deployment} was tuned at {was}, "
        f"and this is {here}; tune for it, into another --deployment to keep both"
    )
