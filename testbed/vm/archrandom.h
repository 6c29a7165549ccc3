/* SPDX-License-Identifier: GPL-2.0 */
#ifndef __ASM_UM_ARCHRANDOM_H__
#define __ASM_UM_ARCHRANDOM_H__

#include <linux/time-internal.h>

ssize_t os_getrandom(void *buf, size_t len, unsigned int flags);

static inline size_t __must_check arch_get_random_longs(unsigned long *v, size_t max_longs)
{
	static unsigned long state;
	ssize_t ret;
	size_t i;

	if (time_travel_mode != TT_MODE_OFF) { /* splitmix64 */
		for (i = 0; i < max_longs; i++) {
			unsigned long z = (state += 0x9e3779b97f4a7c15UL);

			z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9UL;
			z = (z ^ (z >> 27)) * 0x94d049bb133111ebUL;
			v[i] = z ^ (z >> 31);
		}
		return max_longs;
	}
	ret = os_getrandom(v, max_longs * sizeof(*v), 0);
	return ret < 0 ? 0 : ret / sizeof(*v);
}

static inline size_t __must_check arch_get_random_seed_longs(unsigned long *v, size_t max_longs)
{
	return 0;
}

#endif
