"""``python -m headprune``, the command line; so launchers start it:
``accelerate launch -m headprune run RECIPE``."""

from headprune.cli.main import main

if __name__ == "__main__":
    main()
