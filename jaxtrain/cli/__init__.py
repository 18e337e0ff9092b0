"""The command `jaxtrain`: one small file a verb. Verbs parse, call the library and print; they decide nothing."""
