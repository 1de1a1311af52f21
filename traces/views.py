"""Views that answer in one line of SQL what is asked most of stored traces, alike on SQLite and
PostgreSQL (docs/traces.md). They are made with the tables."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Double, Integer, MetaData, Text, column, event, table

from spectune.db.base import Base, UtcDateTime

_OF: Final = "t.ordinal, t.request_id, t.category, t.created_at, {day} AS day, c.pair_id, c.source"
_SUMS: Final = ("rounds", "drafted", "accepted", "emitted", "seconds", "prompts", "batches")
_QUERIES: Final = {
    "requests": f"""
SELECT s.*, CAST(emitted - prompts AS DOUBLE PRECISION) / NULLIF(rounds - prompts, 0) AS tau,
  (2 * batches + rounds) / NULLIF(2 * rounds, 0) AS batch,
  CAST(accepted AS DOUBLE PRECISION) / NULLIF(drafted, 0) AS acceptance,
  emitted / NULLIF(seconds, 0) AS tokens_per_s
FROM (SELECT t.recording_id, {_OF}, e.key AS policy_id, y.label AS policy, t.n_prompt, t.n_output,
    t.finish, {{rounds}}, {{drafted}}, {{accepted}}, {{emitted}}, {{seconds}},
    {{prompts}}, {{batches}}
  FROM trajectory t JOIN recording c ON c.id = t.recording_id
    LEFT JOIN {{policies}} LEFT JOIN policy y ON y.id = e.key) s""",
    "acceptance": f"""
SELECT p.recording_id, {_OF}, p.draft, {{n}} AS position, t.n_output AS starts,
  CAST({{at_risk}} AS DOUBLE PRECISION) AS at_risk,
  CAST({{survived}} AS DOUBLE PRECISION) AS survived
FROM panorama p JOIN trajectory t ON t.recording_id = p.recording_id AND t.ordinal = p.ordinal
  JOIN recording c ON c.id = t.recording_id CROSS JOIN {{positions}}""",
    "publications_in_force": """
SELECT b.version, b.deployment, b.pair_id, b.device, b.policy_id, y.label AS policy,
  b.created_at AS since, (
    SELECT n.created_at FROM publication n
    WHERE n.deployment = b.deployment AND n.pair_id = b.pair_id AND n.version > b.version AND (
      n.device = b.device OR substr(b.device, 1, length(n.device) + 1) = n.device || ':')
    ORDER BY n.version LIMIT 1) AS until, b.actor, b.reason
FROM publication b JOIN policy y ON y.id = b.policy_id""",
}
_ARRAYS: Final = "json_array_elements_text(p.at_risk), json_array_elements_text(p.survived)"
# fmt: off
_DIALECTS: Final = {
    "sqlite": {"day": "substr(t.created_at, 1, 10)", "value": "json_extract(e.value, '$.{}')",
        "policies": "json_each(t.by_policy) e ON 1", "positions": "json_each(p.at_risk) r",
        "n": "r.key", "at_risk": "r.value",
        "survived": "json_extract(p.survived, '$[' || r.key || ']')"},
    "postgresql": {"day": "to_char(t.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')",
        "value": "e.value ->> '{}'", "policies": "LATERAL json_each(t.by_policy) e ON true",
        "positions": f"ROWS FROM ({_ARRAYS}) WITH ORDINALITY r (at_risk, survived, n)",
        "n": "CAST(r.n - 1 AS INTEGER)", "at_risk": "r.at_risk", "survived": "r.survived"},
}
_KINDS: Final[dict[Any, str]] = {UtcDateTime(): "created_at since until", Integer(): "ordinal "
    "n_prompt n_output rounds drafted accepted emitted prompts batches batch position starts "
    "version",
    Double(): "seconds tau acceptance tokens_per_s at_risk survived"}
_KEYS: Final = "recording_id ordinal request_id category created_at day pair_id source "
# fmt: on


@event.listens_for(Base.metadata, "after_create")
def _make(_metadata: MetaData, connection: Connection, **_: Any) -> None:
    words = dict(_DIALECTS[connection.dialect.name])
    for name in _SUMS:
        kind = "DOUBLE PRECISION" if name == "seconds" else "INTEGER"
        words[name] = f"CAST({words['value'].format(name)} AS {kind}) AS {name}"
    for name, query in _QUERIES.items():
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")
        connection.exec_driver_sql(f"CREATE VIEW {name} AS {query.format(**words)}")


def _view(name: str, columns: str) -> Any:
    kinds = {column: kind for kind, names in _KINDS.items() for column in names.split()}
    return table(name, *(column(c, kinds.get(c, Text())) for c in columns.split()))


REQUESTS: Final = _view("requests", f"{_KEYS} policy_id policy n_prompt n_output finish rounds "
                        "drafted accepted emitted seconds prompts batches batch tau acceptance "
                        "tokens_per_s")  # fmt: skip
ACCEPTANCE: Final = _view("acceptance", f"{_KEYS} draft position starts at_risk survived")
IN_FORCE: Final = _view("publications_in_force", "version deployment pair_id device policy_id "
                        "policy since until actor reason")  # fmt: skip
