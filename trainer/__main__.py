"""``python -m trainer task=captioning compile=regional``: the command line, see ``trainer.cli``."""

from importlib import import_module

if __name__ == "__main__":
    try:
        from trainer import working_directory_last

        working_directory_last()  # before anything is imported that a file there could hide
        from trainer.process import quick_exit

        with quick_exit():
            from trainer.cli import main

            main()
    except ImportError as error:
        try:
            overwritten = import_module("crucible").overwritten
        except ImportError:  # a checkout that is not installed, in which nothing is overwritten
            raise error from None
        if not (line := overwritten(error)):  # by another distribution's package of the same name
            raise
        raise SystemExit(f"error: {line}") from None
