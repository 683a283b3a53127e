"""Dialects: the ops of the levels below Graph, one module for each dialect."""
