"""Runs any program, unmodified, in the nodes of a lab.

observed   adds the logs of an observed PyTorch job to the result
order      the order (a command per node) and its result
inside     the program that holds the lab: in a guest, or in a process namespace of this machine
nodes      starts a program in every node, forwards its output, and monitors it until it ends
script     a Python program as a fork of a process that has imported torch, and torchrun's workers likewise
regressions  saves a run's numbers as a baseline, and compares a run with one
talks      traffic between pairs of nodes, by TCP's own counters

`commands.execute` uses this folder, and `report.exec_page` shows the results.
"""
