"""Re-optimization on a schedule, by any number of workers on one database. ``docs/schedules.md``
says what is guaranteed."""

from spectune.optimizer.schedule.book import add_schedule as add_schedule
from spectune.optimizer.schedule.book import get_schedule as get_schedule
from spectune.optimizer.schedule.book import history as history
from spectune.optimizer.schedule.book import list_schedules as list_schedules
from spectune.optimizer.schedule.book import pause_schedule as pause_schedule
from spectune.optimizer.schedule.book import remove_schedule as remove_schedule
from spectune.optimizer.schedule.book import resume_schedule as resume_schedule
from spectune.optimizer.schedule.claims import JobContext as JobContext
from spectune.optimizer.schedule.claims import LeaseLostError as LeaseLostError
from spectune.optimizer.schedule.tick import tick as tick
from spectune.optimizer.schedule.times import ScheduleError as ScheduleError
from spectune.optimizer.schedule.times import Timing as Timing
from spectune.optimizer.schedule.times import format_duration as format_duration
from spectune.optimizer.schedule.times import parse_duration as parse_duration
from spectune.optimizer.schedule.values import Fire as Fire
from spectune.optimizer.schedule.values import Job as Job
from spectune.optimizer.schedule.values import Schedule as Schedule
from spectune.optimizer.schedule.worker import Ended as Ended
from spectune.optimizer.schedule.worker import Execute as Execute
from spectune.optimizer.schedule.worker import HandBack as HandBack
from spectune.optimizer.schedule.worker import WorkReport as WorkReport
from spectune.optimizer.schedule.worker import run_once as run_once
from spectune.optimizer.schedule.worker import run_worker as run_worker
