"""What do both ends remember of earlier messages, so that less has to be sent?

delta     differences from the previous step's tensor of the same micro-batch, in a closed loop or, as a control, an
          open one
history   what these hold: a tensor and a visit number per micro-batch
aqsgd     AQ-SGD: differences from the last visit of the same training example
examples  what it holds: a tensor per example, in memory up to a limit, then in a file
feedback  error feedback: what one message left out is added to a later one
"""
