"""``python -m quantkit``: the same program as the ``quantkit`` script."""

from quantkit.cli.main import run

if __name__ == "__main__":
    run()
