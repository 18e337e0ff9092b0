"""`python -m jaxtrain` is the command `jaxtrain`."""

from jaxtrain.cli.main import main

if __name__ == "__main__":
    main()
