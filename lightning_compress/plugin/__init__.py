"""The Lightning side: strategy, callback, loop and command line. The only folder that imports lightning."""
