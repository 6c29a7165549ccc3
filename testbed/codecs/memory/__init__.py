"""Which state from earlier messages reduces what must be sent?

delta     differences from the previous step's tensor of the same micro-batch, in a closed loop or, as a control, an
          open one
history   their state: a tensor and a visit number per micro-batch
aqsgd     AQ-SGD: differences from the last visit of the same training example
examples  its state: a tensor per example, in memory up to a limit, then in a file
feedback error feedback: the error of one message is added to a later one
"""
