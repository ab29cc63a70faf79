"""`mlxserve doctor`: what this machine and this installation can do."""

import sys


def doctor() -> None:
    """Check this machine and this installation; the table can be pasted into a report."""
    from mlxserve.doctor import diagnose

    is_well = True
    for finding in diagnose():
        print(finding, flush=True)
        is_well = is_well and not finding.is_broken
    if not is_well:
        sys.exit(1)
