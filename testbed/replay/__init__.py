"""Turns a training into a job for the player, and the played times into a run's records.

cells         the job of a cell of any kind
pipelines     the job of a pipeline: its schedule, the recorded bytes, the durations of stages
workers       the same for data parallel training
worker_steps  the steps of data parallel training that certificates are judged by
recorded      the records of a played run: those of the training, with the player's times
"""
