"""Programs that tests start and that import each other by name; pytest collects none of them."""

from pathlib import Path

collect_ignore = [path.name for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_")]
