"""`python book/build.py`: build the book (what `make book` runs). `--help` lists the options."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bookkit.build import main  # noqa: E402

sys.exit(main())
