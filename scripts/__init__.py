"""Scripts: the commands beside training, each run as ``python -m scripts.<name>``."""

import sys

if sys.argv[:1] == ["-m"]:  # Python is looking for the script to run, and has imported nothing for it
    from trainer import working_directory_last

    working_directory_last()
