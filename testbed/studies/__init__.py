"""How do methods affect learning, without a network? Trainers and measurements used only by experiments.

Each does the same maths as the nodes of `nodes`, faster or standalone; a test compares the two.

stacked              many short trainings of one small image network side by side
stacked_text         the same for a character language model, with any codec, local steps, changing choices
tuned_text           its methods, each at its tuned learning rate
federated            federated averaging of digits in one process, round by round
asynchronous_rounds asynchronous rounds in one process, with links as formulas
at_boundaries        effects of codecs on the tensors at a model's boundaries
"""
