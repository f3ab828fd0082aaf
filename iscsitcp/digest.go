package iscsitcp

import (
	"encoding/binary"
	"hash/crc32"
)

// Digests are CRC32C over a segment with its padding, least significant byte first (RFC 7143 section 13.1; the vectors of
// RFC 3720 appendix B.4 are in the tests).

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(sum uint32, b []byte) uint32 { return crc32.Update(sum, castagnoli, b) }

func putDigest(dst []byte, sum uint32) { binary.LittleEndian.PutUint32(dst, sum) }

func getDigest(src []byte) uint32 { return binary.LittleEndian.Uint32(src) }
