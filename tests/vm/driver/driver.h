/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the two modules of the driver's double share. */
#ifndef DRIVER_DOUBLE_H
#define DRIVER_DOUBLE_H

/* Counts an open of nvidia-uvm in the books of the calling process. */
void nvidia_double_uvm_opened(void);

#endif
