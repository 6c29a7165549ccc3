"""What does sampling one batch of images with several workers send, how long does it take, and what does it change?

The third kind of traffic: a diffusion transformer whose workers exchange activations at every layer of every denoising
step.

| module | what it holds | torch |
|---|---|---|
| `dit` | a class-conditional diffusion transformer on digits, dense or with experts, and the unsplit sampler | yes |
| `pretrain` | trains it once a machine, and the classifier whose features quality is measured in | yes |
| `quality` | relative L2, PSNR, Frechet distance | yes |
| `programs` | who computes, sends and waits for what, in which order: lists of actions, and their traces | no |
| `workers` | what a worker of a program computes, with real payloads | yes |
| `experts` | the same for expert parallelism of the variant with experts, and DICE's schedules | yes |
| `node` | a worker as a node of `jobs.sampling`, and all of them in one process | yes |
| `live` | samples with a worker in each node of a lab, over TCP, on the virtual clock | yes |
| `inside` | what `live` runs in the guest | yes |
"""
