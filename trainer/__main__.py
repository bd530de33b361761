"""``python -m trainer task=captioning compile=regional``: the command line, see ``trainer.cli``."""

if __name__ == "__main__":
    try:
        from trainer import working_directory_last
    except ImportError as error:  # another distribution's package of this name lies over ours
        raise SystemExit(f"error: {error}; crucible doctor says more") from None

    working_directory_last()  # before anything is imported that a file there could hide
    from trainer.process import quick_exit

    with quick_exit():
        from trainer.cli import main

        main()
