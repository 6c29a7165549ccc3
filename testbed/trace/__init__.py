"""Traces: what every node of a job does, independent of the network. The interface between jobs and networks.

format          lanes of operations that work, send, receive, signal and wait; reading and writing
check           validates a trace
totals          sums operations, bytes and work
tracing         makes a trace from a job's program, as an observer of the loop that runs it
simulate        computes the times of operations if messages take no time, or the time given by a formula
played          the times of played operations, and their file
synthetic       traces without a model: a pipeline, a transfer
observations    the recordings of an observed PyTorch job (testbed.torch): totals, timeline
kineto          reads profiles of torch.profiler as such recordings
join_ranks      makes a trace of recordings, with the messages that gloo sends (gloo)
chakra          converts traces to Chakra's execution traces and back; chakra_file reads and writes their files,
                chakra_collectives expands collectives into messages

format and played need only the standard library.
"""
