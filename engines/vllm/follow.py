"""`follow`: brings what vLLM's agent notes in a folder into the database, and what is published
into the folder.

The agent never waits for it. While the database is away, files stay in the folder, of which the
agent keeps so many; here no more than a chunk of one is in memory.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from spectune.db.compression import zstd
from spectune.db.database_errors import DatabaseError, NotFoundError, UnavailableError
from spectune.engines.vllm.folder import (
    Line,
    NotedRequest,
    ServerDescription,
    parse_line,
    read_lines,
    rounds_files,
)
from spectune.engines.vllm.follow_policy import PolicyWriter, Texts, file_of, place_of
from spectune.engines.vllm.locks import FolderLock
from spectune.runtime.pair import PairSpec
from spectune.runtime.reload import reason_of
from spectune.traces.errors import SpectuneError, TraceError
from spectune.traces.files import replacing
from spectune.traces.schema import Sampling, Step
from spectune.traces.store import Asked, TraceStore
from spectune.traces.store.followed import Arrivals, Arrived, FilePlace
from spectune.traces.store.recordings import digest_of
from spectune.traces.store.rows import put_apart
from spectune.traces.tables import FollowedServer
from spectune.traces.text import one_line

LOOK_S = 0.25
"""Seconds between two looks for a publication, and for new lines."""
REPORT_S = 60.0
"""Seconds between two reports, and two looks for what is to be forgotten."""
LEFT_S = 30.0
"""Seconds after which it is told how much is left of what takes so long to bring in."""
ENDED_S = 86_400.0
"""Seconds after which the last file of a server that ended is removed."""
RECORDINGS_LIMIT = 64
"""Recordings of one boot, one for each sampling that requests ask for; further ones are together
in one, without their texts."""
NAMED_LIMIT = 5
"""Broken lines that are named between two reports."""
WORDS = {
    "without_text": "of them without a stored text",
    "skipped": "broken lines skipped",
    "forgotten": "requests forgotten",
}


@dataclass(frozen=True)
class Limits:
    """What stays: in the database requests for ``seconds`` and of ``stored_bytes``, in the folder
    compressed files of ``file_bytes`` (0: none). None: all."""

    seconds: float | None = None
    stored_bytes: int | None = None
    file_bytes: int = 0


@dataclass
class Totals:
    """What was done: requests brought in, those of them ``without_text``, lines skipped, requests
    forgotten."""

    requests: int = 0
    without_text: int = 0
    skipped: int = 0
    forgotten: int = 0


class Boot(NamedTuple):
    """A boot of a server: up to where it is in, how it serves, and its draft's name."""

    row: FollowedServer
    engine: ServerDescription
    draft: str


class Follower:
    """Follows one folder. ``tell`` gets a line whenever something changed, and once a minute."""

    def __init__(
        self,
        store: TraceStore,
        folder: Path,
        deployment: str,
        tell: Callable[[str], None],
        *,
        pair: PairSpec | None = None,
        texts: Texts = None,
        limits: Limits = Limits(),
    ) -> None:
        self.store, self.folder, self.limits, self.totals = store, folder, limits, Totals()
        self.policy = PolicyWriter(store, folder, deployment, tell, pair=pair, texts=texts)
        self._tell = tell
        shares = {"all": 1.0, "none": 0.0}
        self._share = 1.0 if texts is None else float(shares.get(str(texts), texts))
        self._boots: dict[str, Boot] = {}
        self._finished: set[str] = set()
        self._troubles: dict[str, str] = {}
        self._away, self._brought_in_s = set[str](), time.monotonic()
        self._named_lines = 0

    @property
    def place(self) -> str:
        """Its host and folder (:class:`FollowedServer`)."""
        return place_of(self.folder)

    @property
    def lag_s(self) -> float:
        """Seconds since it brought in all that there was."""
        return time.monotonic() - self._brought_in_s

    @property
    def is_away(self) -> bool:
        """Whether the database could not be used last."""
        return bool(self._away)

    def unread_bytes(self) -> int:
        """Bytes in the folder that are not in the database."""
        total = 0
        for boot, files in rounds_files(self.folder).items():
            row = self._boots[boot].row if boot in self._boots else None
            for number, path in files.items():
                with suppress(FileNotFoundError):  # the agent, or the other thread, has removed it
                    if row is None or number >= row.file:
                        is_begun = row is not None and number == row.file
                        total += path.stat().st_size - (row.bytes if row and is_begun else 0)
        return total

    @property
    def servers(self) -> Sequence[FollowedServer]:
        """The boots that were followed here, as they are stored."""
        return [boot.row for boot in self._boots.values()]

    def once(self) -> None:
        """Does what there is to do. Raises SpectuneError, also where another follows the folder,
        and DatabaseError."""
        with self._lock():
            self.policy.look()
            if self.policy.status is None:
                self._tell(f"{self.folder}: no status.json yet, which the agent of a server writes")
            self.bring_in()
            self.forget()

    def run(self, stop: threading.Event) -> None:
        """Goes on until ``stop``, whatever fails. Raises TraceError where another follows the
        folder."""
        with self._lock():
            name, deployment = file_of(self.store.database), self.policy.deployment
            self._tell(f"follows {self.folder} into {name}, deployment {deployment}")
            self._run(stop)

    def _lock(self) -> FolderLock:
        database = self.store.database
        lock = FolderLock(self.folder, "follow", f"followed into {file_of(database)}")
        with suppress(DatabaseError):  # it is away: the lock holds without its id
            lock.name_database(database.id)
        return lock

    def _run(self, stop: threading.Event) -> None:

        def look() -> None:
            while not stop.wait(LOOK_S):
                self._guarded("policy", self.policy.look)

        thread = threading.Thread(target=look, name="publications", daemon=True)
        thread.start()
        before, reported = Totals(), time.monotonic()
        while not stop.wait(LOOK_S):
            self._guarded("requests", lambda: self.bring_in(stop))
            if (seconds := time.monotonic() - reported) >= REPORT_S:
                self._guarded("retention", self.forget)
                before, reported = self._report(before, seconds), time.monotonic()
        thread.join(5)

    def bring_in(self, stop: threading.Event | None = None) -> None:
        """Brings in every line that is whole, and removes files that are in. Raises SpectuneError,
        OSError and DatabaseError; the next call goes on there."""
        status = self.policy.status
        current = status.boot if status is not None else None
        failure: SpectuneError | None = None
        told_s = time.monotonic()
        # Ended servers first: what they served is older.
        for boot, files in sorted(rounds_files(self.folder).items(), key=lambda f: f[0] == current):
            try:
                while self._bring_chunk(boot, files) and not (stop and stop.is_set()):
                    if time.monotonic() - told_s >= LEFT_S:
                        told_s, left = time.monotonic(), self.unread_bytes() / 1e6
                        self._tell(f"{self.totals.requests} requests are in; {left:.0f} MB left")
                self._clear(boot, files, is_ended=current not in (None, boot))
            except FileNotFoundError:
                continue  # the agent has removed it
            except SpectuneError as error:  # the other boots go on
                failure = error
            except Exception:
                self._boots.pop(boot, None)  # its row is read anew
                raise
        self._bound_files()
        if failure is not None:
            raise failure
        self._brought_in_s = time.monotonic()

    def forget(self) -> None:
        """Removes from the database what is beyond the limits. Raises DatabaseError."""
        limits, pairs = self.limits, {boot.row.pair_id for boot in self._boots.values()}
        if limits.seconds is not None or limits.stored_bytes is not None:
            before, most_bytes = None, limits.stored_bytes
            if limits.seconds is not None:
                before = self.store.clock() - timedelta(seconds=limits.seconds)
            pairs.add(self.policy.pair_id)
            self.totals.forgotten += self.store.forget(pairs, before=before, most_bytes=most_bytes)

    def _guarded(self, task: str, act: Callable[[], None]) -> None:
        """Does something; what goes wrong is said once, and it is tried again at the next turn."""
        before = self._troubles.get(task, "")
        try:
            if self.store.database.dialect == "sqlite":
                self.store.database.close()  # reopened: a deleted file would stay open
            act()
        except Exception as error:  # whatever a folder or a database raises: following goes on
            is_plain = isinstance(error, (DatabaseError, SpectuneError))
            if isinstance(error, UnavailableError):
                self._away.add(task)
            trouble = str(error) if is_plain else reason_of(error)
            if trouble != before:
                self._tell(f"{task}: {trouble}; trying again")
            self._troubles[task] = trouble
        else:
            self._troubles[task] = ""
            self._away.discard(task)
            if before:
                self._tell(f"{task}: it works again")

    # ------------------------------------------------------------------------------ reading files

    def _bring_chunk(self, boot: str, files: dict[int, Path]) -> bool:
        """Brings in some lines; whether more may follow."""
        row = self._boot(boot, files).row
        lines = read_lines(files[row.file], row.bytes) if row.file in files else []
        if lines:
            return self._bring_lines(boot, row.file, lines)
        following = next((n for n in files if n > row.file), None)
        if following is None:
            return False
        if row.file not in files and row.file:
            lost = f"files {row.file} to {following - 1}"
            self._tell(f"server {boot}: {lost} were removed before they were in")
        return self._store(boot, FilePlace(following, 0), Arrivals())

    def _bring_lines(self, boot: str, file: int, lines: Sequence[Line]) -> bool:
        """Brings lines in, in one transaction, or where the database refuses what is in them each
        in its own; whether they are in."""

        def put(part: Sequence[Line]) -> bool:
            before, end = self._named_lines, FilePlace(file, part[-1].end)
            try:
                return self._store(boot, end, self._arrivals(boot, file, part))
            except Exception:
                self._named_lines = before
                raise

        def skip(line: Line, error: Exception) -> bool:
            self._name_line(boot, FilePlace(file, line.start), str(error))
            return self._store(boot, FilePlace(file, line.end), Arrivals(skipped=1))

        return put_apart(lines, put, skip, (UnavailableError, NotFoundError))

    def _arrivals(self, boot: str, file: int, lines: Sequence[Line]) -> Arrivals:
        server = self._boots[boot]
        requests: list[Arrived] = []
        recordings: dict[str, Asked] = {}
        skipped = 0
        for line in lines:
            try:
                noted = parse_line(line.text) if line.text.strip() else None
                if not isinstance(noted, NotedRequest) or noted.is_sent:
                    continue
                steps = noted.steps(server.draft, self._policy_id)
                requests.append(self._request(boot, noted, steps, recordings))
            except TraceError as error:
                skipped += 1
                self._name_line(boot, FilePlace(file, line.start), str(error))
        return Arrivals(requests, recordings, skipped)

    def _request(
        self, boot: str, line: NotedRequest, steps: Sequence[Step], recordings: dict[str, Asked]
    ) -> Arrived:
        """A request, its recording added to ``recordings``; without its text where that is not
        noted, or not to be stored."""
        row, engine, _ = self._boots[boot]
        request = line.trajectory(engine, with_text=bool(steps) and line.is_within(self._share))
        options = {**engine.about, "boot": boot}
        sampled = request.sampling, engine.max_len, request.verifier
        recording = Asked(row.pair_id, None, *sampled, options, "serve")
        digest, digests = digest_of(recording), row.recordings.keys() | recordings.keys()
        if digest not in digests and len(digests) >= RECORDINGS_LIMIT:
            request = line.trajectory(engine, with_text=False)
            recording = replace(recording, sampling=Sampling(), verifier="coupled")
            digest = digest_of(recording)
        recordings[digest] = recording
        return Arrived(digest, request, steps, datetime.fromtimestamp(line.ended, UTC))

    def _name_line(self, boot: str, place: FilePlace, problem: str) -> None:
        self._named_lines += 1
        if self._named_lines <= NAMED_LIMIT:
            name = f"rounds-{boot}-{place.file:06d}.jsonl"
            self._tell(f"{name}, byte {place.bytes}: {problem}; this line is skipped")

    def _store(self, boot: str, end: FilePlace, arrivals: Arrivals) -> bool:
        """Stores what stands in the files up to ``end``; False where another process has."""
        row = self.store.bring_in(self._boots[boot].row, end, arrivals)
        if row is None:
            del self._boots[boot]
            return False
        self._boots[boot] = self._boots[boot]._replace(row=row)
        self.totals.requests += len(arrivals.requests)
        self.totals.without_text += sum(r.trajectory.tokens is None for r in arrivals.requests)
        self.totals.skipped += arrivals.skipped
        return True

    def _boot(self, boot: str, files: Mapping[int, Path]) -> Boot:
        """A boot of the server, stored where it is new. Raises TraceError and PairError."""
        if boot in self._boots:
            return self._boots[boot]
        path = next(iter(files.values()))
        lines = read_lines(path, 0)
        engine = parse_line(lines[0].text) if lines else None
        if not isinstance(engine, ServerDescription):
            raise TraceError(f"{path}: its first line does not say how the server serves")
        row, draft = self.policy.meet(boot, engine)
        return self._boots.setdefault(boot, Boot(row, engine, draft))

    def _policy_id(self, version: int) -> str:
        """The id of a table's policy; of one that nobody knows any more its version."""
        if version not in self.policy.policies:
            rollout = self.store.rollout(-version) if version < 0 else None
            stored = rollout.policy_id if rollout else self.store.published_policy_id(version)
            self.policy.policies[version] = stored or f"version-{version}"
        return self.policy.policies[version]

    # ------------------------------------------------------------------------------ removing files

    def _clear(self, boot: str, files: Mapping[int, Path], *, is_ended: bool) -> None:
        """Removes, or compresses, the files that are in whole, but not the newest of a boot until
        that has ended a day ago."""
        if boot not in self._boots:
            return
        row = self._boots[boot].row
        ready = [path for number, path in files.items() if number < row.file]
        newest = files[max(files)]
        if is_ended and max(files) <= row.file and not read_lines(newest, row.bytes):
            if boot not in self._finished:
                for name in row.recordings.values():
                    with suppress(NotFoundError):
                        self.store.finish_recording(name)
                self._finished.add(boot)
            if time.time() - newest.stat().st_mtime > ENDED_S:
                ready.append(newest)
        for path in ready:
            if self.limits.file_bytes:
                with (
                    path.open("rb") as source,
                    replacing(f"{path}.zst") as file,
                    zstd.open(file, "wb") as compressed,
                ):
                    shutil.copyfileobj(source, compressed)
            path.unlink(missing_ok=True)

    def _bound_files(self) -> None:
        """Removes the oldest compressed files beyond the limit."""
        files = sorted(self.folder.glob("rounds-*.jsonl.zst"), key=lambda f: f.stat().st_mtime)
        room = self.limits.file_bytes
        for file in reversed(files) if room else ():
            room -= file.stat().st_size
            if room < 0:
                file.unlink(missing_ok=True)

    def _report(self, before: Totals, seconds: float) -> Totals:
        """Tells what was done since ``before``; the totals now."""
        now, status = replace(self.totals), self.policy.status
        more = {name: value - getattr(before, name) for name, value in vars(now).items()}
        requests = more["requests"]
        parts = [f"{requests} requests ({requests / max(seconds, 1e-9):.3g}/s)"]
        parts += [f"{more[name]} {text}" for name, text in WORDS.items() if more[name]]
        version = self.policy.version
        parts.append(f"policy version {version}" if version else "nothing is published")
        if status is None:
            parts.append("no status.json yet")
        else:
            if silent := self.policy.silent_since:
                parts.append(f"server silent since {silent}")
            if (runs := status.in_force.version) != version:
                own = f"version {runs}" if runs else "its own number of draft tokens"
                parts.append(f"in force there: {own}")
            if status.trial is not None and not status.trial.is_over:
                parts.append("another policy is tried")
            parts += [f"{status.dropped} dropped by the agent"] * bool(status.dropped)
            parts += [f"the agent says: {one_line(status.fault, 200)}"] if status.fault else []
        self._tell("; ".join(parts))
        self._named_lines = 0
        return now
