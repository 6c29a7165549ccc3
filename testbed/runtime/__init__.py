"""Runs the program of a place of a live job over real sockets. No torch.

live                  runs the program of one place, of any kind of job, over sockets
transport, frame      frames over TCP, and their header
pacing                start and end times of actions: in this machine's time, or an emulated device's
gather, ending        barrier at the end of a step, and agreement on the end of a job
carried               measures how long a link was busy with frames
step_log              writes the records of steps, and reports to the controller
place_job, wiring     the order to a place; its connections
control_plane, host   the controller's end of the control plane; the place's process
failures              explains failures of a place's maths and memory
"""
