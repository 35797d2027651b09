"""Convert rows to pandas data frames. pandas is imported on the first call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipeline.results.tables import Row
from workers.errors import require_package

if TYPE_CHECKING:
    import pandas as pd


def data_frame(rows: list[Row], columns: Iterable[str] = ()) -> pd.DataFrame:
    """Return rows as a data frame.

    Args:
        rows: The rows.
        columns: Columns of the result if there are no rows; otherwise they are not used.

    Raises:
        UserError: If pandas is not installed.
    """
    require_package(
        "pandas",
        "a table in Python",
        "read the CSV files beside the run's report, which have the same numbers",
    )
    import pandas as pd  # start-up time

    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(columns))
