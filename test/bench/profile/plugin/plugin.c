/*
 * QEMU plugin that counts instructions by translation block, for the benchmark's cells "share". Compiled when they are measured.
 *
 * The guest marks the part it wants counted with a no-op that nobody else uses, nopl 0x515300NN(%rax): NN = 1 sets all counters to zero, NN = 2
 * writes them to the file given by "out=", one line "address instructions executions" per block and a line "end" after them.
 *
 * The prototypes are those of qemu-plugin.h, version 1 of the interface (QEMU 4.2 to 8.2), which Debian does not package.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
typedef struct qemu_info_t qemu_info_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum qemu_plugin_cb_flags { QEMU_PLUGIN_CB_NO_REGS, QEMU_PLUGIN_CB_R_REGS, QEMU_PLUGIN_CB_RW_REGS };
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
typedef void (*qemu_plugin_vcpu_tb_trans_cb_t)(qemu_plugin_id_t, struct qemu_plugin_tb *);
typedef void (*qemu_plugin_vcpu_udata_cb_t)(unsigned int, void *);

extern void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, qemu_plugin_vcpu_tb_trans_cb_t);
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, enum qemu_plugin_op, void *, uint64_t);
extern void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, qemu_plugin_vcpu_udata_cb_t, enum qemu_plugin_cb_flags, void *);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
extern uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
extern struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
extern const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
extern size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

/* A block as it was translated: the same address may be translated to several lengths. */
struct block {
	uint64_t address, instructions, executions;
	struct block *next;
};

#define BUCKETS (1 << 16)
static struct block *buckets[BUCKETS];
static const char *path;

static struct block *find(uint64_t address, uint64_t instructions)
{
	struct block **b = &buckets[(address ^ address >> 16 ^ instructions << 7) % BUCKETS];

	for (; *b; b = &(*b)->next)
		if ((*b)->address == address && (*b)->instructions == instructions)
			return *b;
	*b = calloc(1, sizeof(**b));
	if (!*b)
		abort();
	(*b)->address = address;
	(*b)->instructions = instructions;
	return *b;
}

static void marked(unsigned int vcpu, void *what)
{
	FILE *f = NULL;

	(void)vcpu;
	if (what) {
		f = fopen(path, "w");
		if (!f) {
			perror(path);
			abort();
		}
	}
	for (size_t i = 0; i < BUCKETS; i++)
		for (struct block *b = buckets[i]; b; b = b->next) {
			if (f && b->executions)
				fprintf(f, "%llx %llu %llu\n", (unsigned long long)b->address, (unsigned long long)b->instructions,
					(unsigned long long)b->executions);
			if (!f)
				b->executions = 0;
		}
	if (f && (fprintf(f, "end\n") < 0 || fclose(f))) {
		perror(path);
		abort();
	}
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	static const uint8_t mark[] = { 0x0f, 0x1f, 0x80 };
	size_t n = qemu_plugin_tb_n_insns(tb);

	(void)id;
	for (size_t i = 0; i < n; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
		const uint8_t *d = qemu_plugin_insn_data(insn);

		if (qemu_plugin_insn_size(insn) == 7 && !memcmp(d, mark, sizeof(mark)) && d[4] == 0x00 && d[5] == 0x53 && d[6] == 0x51 &&
		    (d[3] == 1 || d[3] == 2))
			qemu_plugin_register_vcpu_insn_exec_cb(insn, marked, QEMU_PLUGIN_CB_NO_REGS, (void *)(uintptr_t)(d[3] == 2));
	}
	qemu_plugin_register_vcpu_tb_exec_inline(tb, QEMU_PLUGIN_INLINE_ADD_U64, &find(qemu_plugin_tb_vaddr(tb), n)->executions, 1);
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc, char **argv)
{
	(void)info;
	if (argc != 1 || strncmp(argv[0], "out=", 4)) {
		fprintf(stderr, "plugin: give it out=FILE\n");
		return -1;
	}
	path = strdup(argv[0] + 4);
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
