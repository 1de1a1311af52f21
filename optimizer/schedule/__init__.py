"""Tunings on a schedule, performed by any number of workers on one database.

In: the settings of a ``tune`` and a cron expression. Out: attempts, each performed under a lease by
one worker alone. ``docs/schedules.md`` says what is guaranteed.
"""

from spectune.db.schedules import Attempt as Attempt
from spectune.db.schedules import Schedule as Schedule
from spectune.optimizer.schedule.store import Job as Job
from spectune.optimizer.schedule.store import LeaseLostError as LeaseLostError
from spectune.optimizer.schedule.store import ScheduleError as ScheduleError
from spectune.optimizer.schedule.store import add_schedule as add_schedule
from spectune.optimizer.schedule.store import claim as claim
from spectune.optimizer.schedule.store import edit_schedule as edit_schedule
from spectune.optimizer.schedule.store import history as history
from spectune.optimizer.schedule.store import list_schedules as list_schedules
from spectune.optimizer.schedule.store import make_due as make_due
from spectune.optimizer.schedule.store import next_slot as next_slot
from spectune.optimizer.schedule.store import remove_schedule as remove_schedule
from spectune.optimizer.schedule.worker import run_worker as run_worker
