"""``python -m trainer task=captioning compile=regional``: the command line, see ``trainer.cli``."""

from trainer.cli import main

if __name__ == "__main__":
    main()
