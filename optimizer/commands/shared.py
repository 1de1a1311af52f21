"""How commands open a store, find the pair, the policy and the profile that are meant, and load a
pair."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from spectune.optimizer.commands.config import blamed
from spectune.optimizer.commands.printing import DECODED, PAIR_FOUND, RECORDINGS, note

if TYPE_CHECKING:
    from spectune.optimizer.execute import DecodeOptions
    from spectune.optimizer.overlong import Overlong
    from spectune.runtime.loading import LoadedPair
    from spectune.runtime.pair import PairSpec
    from spectune.runtime.policies.document import Policy
    from spectune.runtime.policies.plan import Plan
    from spectune.runtime.text_codec import TextCodec
    from spectune.traces.schema import Workload
    from spectune.traces.store import TraceStore
    from spectune.traces.tables import LatencyProfile, Recording


def typed(*options: str) -> bool:
    """Whether one of these was typed, and is no default of the environment's or the file's."""
    ctx = click.get_current_context()
    return any(ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in options)


def refuse_typed(error: type[Exception], why: str, refused: Callable[[str], bool]) -> None:
    """Raises ``error``, which says ``why``, for the first option typed that is ``refused`` by
    name."""
    for param in click.get_current_context().command.params:
        name = param.name or ""
        if param.expose_value and refused(name) and typed(name):
            raise error(f"{param.opts[0]} {why}")


def nothing_decoded(by: str, *also: str) -> None:
    """Raises UsageError for an option that says what is decoded or how, or one of ``also``, typed
    beside ``by``, an option that names texts."""
    why = f"has no effect with {by}, whose texts are there; leave it out"
    refused = {*DECODED, "limit", "limit_seed", "categories", *also}
    refuse_typed(click.UsageError, why, refused.__contains__)


def pair_spec(
    kw: dict[str, Any], store: TraceStore | None = None, recording: str | None = None
) -> PairSpec:
    """The pair meant, its checkpoints there: the one that is typed, else that of a recording that
    is, else the environment's or spectune.toml's, else of a ``recording`` by default. Imports no
    torch. Raises PairError, also where nothing names one: no pair is taken in silence."""
    from spectune.runtime.pair import PairSpec, read_pair
    from spectune.traces.errors import PairError

    ctx = click.get_current_context()
    pair, target, drafts = kw["pair"], kw["target"], kw["drafts"]
    if target is not None or drafts or typed("pair"):
        spec = read_pair(pair if typed("pair") else None, target, drafts)
    elif store is not None and recording is not None and (pair is None or typed(*RECORDINGS)):
        where = f"the pair of recording {recording}"
        stored = store.get_pair(store.get_recording(recording).pair_id)
        ctx.meta[PAIR_FOUND] = spec = PairSpec.from_json(stored.document, where=where)
        try:
            spec.check()
        except PairError as error:
            raise PairError(f"{where}: {error}; say where it is now by --pair") from None
    elif pair is None:
        raise PairError(
            f"{ctx.info_name}: no pair is named; say --pair FILE (or --pair demo), "
            "set SPECTUNE_PAIR, or put pair = ... in spectune.toml (`init` writes one)"
        )
    else:
        with blamed(ctx, "pair", ctx.get_parameter_source("pair")):
            spec = read_pair(pair)
    spec.check()
    return spec


def quiet_transformers() -> None:
    """stderr is for a command's own lines: neither bars nor warnings while models are loaded."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def load(kw: dict[str, Any], spec: PairSpec, *, notes: bool = True) -> LoadedPair:
    """Loads a pair as :data:`options.devices` say; with ``notes`` what is to be known of its drafts
    is said. Raises PairError."""
    import torch

    from spectune.runtime.loading import load_pair

    quiet_transformers()
    pair = load_pair(spec, device=kw["device"], dtype=kw["dtype"], threads=kw["threads"])
    torch.set_num_threads(pair.threads)
    for line in pair.notes if notes else ():
        note(line)
    return pair


def fit_to(
    pair: TextCodec,
    workload: Workload,
    options: DecodeOptions,
    overlong: Overlong,
    drafts: Collection[str] | None = None,
) -> Workload:
    """The workload with its prompts in the context of the target and the ``drafts`` that are used
    (:func:`optimizer.overlong.made_to_fit`); what was done is said."""
    from spectune.optimizer.overlong import made_to_fit

    kept, done = made_to_fit(pair, workload, options, overlong, drafts)
    if done:
        note(done)
    return kept


def database_url() -> str:
    """``--db``."""
    return str(click.get_current_context().find_root().obj)


@contextmanager
def open_store(*, create: bool = True) -> Iterator[TraceStore]:
    """The store of ``--db``. A database that does not exist is an error unless ``create``, and is
    made by what is stored first: a command that fails before leaves none behind. Raises
    DatabaseError."""
    from spectune.db.database import open_database
    from spectune.traces.store import TraceStore

    with open_database(database_url(), create=create) as database:
        yield TraceStore(database)


def recorded(store: TraceStore, recording: str, since: datetime | None) -> str:
    """The id of a recording; with ``since`` that of a new one, a sample of what its pair decoded
    since then."""
    from spectune.optimizer.traffic import gather

    name = store.resolve_recording(recording)
    if since is None:
        return name
    window, key = store.clock() - since, f"since {since.isoformat()}"
    return gather(store, store.get_recording(name).pair_id, window, key=key, tell=note)


def on_pair_of(store: TraceStore, pair_id: str) -> None:
    """The commands that this one prints are of a stored pair, where it can be read."""
    from spectune.runtime.pair import PairSpec
    from spectune.traces.errors import PairError

    with suppress(PairError):
        spec = PairSpec.from_json(store.get_pair(pair_id).document, where=pair_id)
        click.get_current_context().meta[PAIR_FOUND] = spec


def check_policy(store: TraceStore, name: str, *, option: str = "--policy") -> None:
    """Raises PolicyError for a name that is no policy's: called before a model is loaded."""
    if name != "active":
        policy_named(store, name, "", "", option=option)


def policy_named(
    store: TraceStore,
    name: str,
    pair_id: str,
    device: str,
    deployment: str = "default",
    *,
    option: str = "--policy",
) -> Policy:
    """A policy by built-in name, file, inline JSON, id, or ``active``. Raises PolicyError."""
    from spectune.db.errors import NotFoundError
    from spectune.optimizer.inputs import policy_of
    from spectune.runtime.policies.document import AUTOREGRESSIVE
    from spectune.traces.errors import PolicyError
    from spectune.traces.text import shortened

    try:
        policy = policy_of(store, name, pair_id, device, deployment)
    except NotFoundError as error:
        raise PolicyError(
            f"{option} {shortened(name)}: neither a file, a JSON document, 'active' nor "
            f"'autoregressive', and {shortened(str(error))} (see `policies list`)"
        ) from None
    if policy is None:
        say_unpublished(pair_id, device, deployment)
    return policy or AUTOREGRESSIVE


def say_unpublished(pair_id: str, device: str, deployment: str) -> None:
    note(
        f"no policy is published for pair {pair_id} on {device} in deployment {deployment}; "
        "decoding autoregressively"
    )


def prepared(
    store: TraceStore,
    pair: LoadedPair,
    name: str,
    options: DecodeOptions,
    profile: LatencyProfile | None,
    deployment: str = "default",
) -> Plan:
    """A policy by name (:func:`policy_named`), ready to decode with a loaded pair. Says on stderr
    where it was tuned for another sampling. Raises PolicyError."""
    from spectune.optimizer.artifacts import fitted
    from spectune.optimizer.deployment import other_sampling
    from spectune.runtime.decoder import prepare_for

    where = pair.id, pair.device.type, deployment
    policy = policy_named(store, name, *where)
    active = store.active_publication(*where) if name == "active" else None
    if active and (warning := other_sampling(active, options.sampling, options.verifier)):
        note(f"warning: {warning}")
    return prepare_for(pair, policy, profile=profile, artifacts=fitted(store, pair.id))


def say_unseen(info: Recording, seen: int) -> None:
    """Notes the requests of a recording that are left out, as its drafts have not looked around in
    them: a server adds some all the time."""
    if seen < info.n_requests:
        note(
            f"left out: {info.n_requests - seen} of {info.n_requests} requests, which lack "
            f"panoramas; `record --resume {info.id}` makes them"
        )
