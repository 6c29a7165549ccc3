"""How much traffic and time does sampling a batch of images with several workers need, and how does it change images?

The third kind of traffic: a diffusion transformer whose workers exchange activations at every layer of every denoising
step.

dit              a class-conditional diffusion transformer on digits, dense or with experts, and the unsplit sampler
                 (torch)
pretrain         trains it once per machine, and the classifier whose features define quality (torch)
quality          relative L2, PSNR, Frechet distance (torch)
programs         each worker's order of computing, sending and waiting: lists of actions, and their traces
workers          a worker's computation, with real payloads (torch)
experts          the same for expert parallelism of the variant with experts, and DICE's schedules (torch)
node             a worker as a node of `jobs.sampling`, and all of them in one process (torch)
over_links       samples with a worker in each node of a lab, over TCP, on the virtual clock (torch)
sample_in_guest  the program that `over_links` runs in the guest (torch)
"""
