"""The command line. Importing it must not import torch."""
