"""`db`: everything that has an id, shown and pruned; the schema, and whether all is sound."""

from __future__ import annotations

from spectune.db.database import upgrade
from spectune.db.integrity import check as check_database
from spectune.optimizer.commands.common import Talk, open_store
from spectune.optimizer.commands.results import Result, Table, listed
from spectune.options import unknown
from spectune.settings import DbCheck, DbPrune, DbShow
from spectune.traces.store.export import plain
from spectune.traces.store.inventory import KINDS, PRUNED, counts, list_kind
from spectune.traces.store.inventory import prune as prune_kinds
from spectune.traces.store.inventory import show as show_id


def show(s: DbShow, talk: Talk) -> Result:
    with open_store(s) as store:
        if s.what is None:
            number = counts(store)
            rows = [{"kind": kind, "how_many": n} for kind, n in number.items()]
            return Result("", number, rows, [Table(rows)])
        if s.what in KINDS:
            kinds = [plain(row) for row in list_kind(store, s.what, limit=s.rows)]
            return listed(s.what, kinds)
        kind, columns = show_id(store, s.what)
        if kind == "artifacts":
            artifact = store.get_artifact(columns["id"])
            shapes = {key: list(array.shape) for key, array in artifact.arrays.items()}
            columns |= {"document": artifact.document, "arrays": shapes}
    return Result.document({"of": kind, **plain(columns)})


def prune(s: DbPrune, talk: Talk) -> Result:
    for kind in s.kinds:
        if kind not in PRUNED:
            raise unknown(kind, PRUNED, "kind")
    with open_store(s) as store:
        ids = [store.resolve_recording(name) for name in s.id]
        removed = prune_kinds(
            store,
            ("recordings",) if ids else s.kinds or PRUNED,
            named=ids,
            before=s.older_than,
            keep_last=s.keep_last,
            force=s.force,
            dry_run=s.dry_run,
        )
        if not s.dry_run:
            store.database.vacuum()
    rows = [
        {"kind": k, "removed": len(v["removed"]), "spared": len(v["spared"]), "ids": v["removed"]}
        for k, v in removed.items()
    ]
    data = {key: {k: v[key] for k, v in removed.items()} for key in ("removed", "spared")}
    title = "would be removed" if s.dry_run else "removed"
    return Result("", {**data, "dry_run": s.dry_run}, rows, [Table(rows, title=title)])


def check(s: DbCheck, talk: Talk) -> Result:
    if s.upgrade:
        before, after = upgrade(s.db)
        change = f"already at {after}" if before == after else f"{before or 'new'} -> {after}"
        talk.tell(f"schema {change}")
    report = check_database(s.db)
    text = "the database is sound" if report.ok else "\n".join(report.problems)
    return Result(text, report.to_json(), exit_code=0 if report.ok else 1)
