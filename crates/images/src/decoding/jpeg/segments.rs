//! Markers, and the tables that segments define.

use super::bits::HuffmanTable;
use super::error;
use crate::error::ImageError;

/// Reads markers and segments.
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// The next marker; bytes before it are skipped.
    pub fn marker(&mut self) -> Option<u8> {
        loop {
            let start = self.rest().iter().position(|&byte| byte == 0xff)?;
            self.at += start;
            let fill = self.rest().iter().position(|&byte| byte != 0xff)?;
            self.at += fill + 1;
            let marker = self.bytes[self.at - 1];
            if marker != 0 {
                return Some(marker);
            }
        }
    }

    /// The contents of the segment after a marker.
    pub fn segment(&mut self) -> Result<&'a [u8], ImageError> {
        let rest = self.rest();
        let len = rest
            .first_chunk()
            .map(|len| usize::from(u16::from_be_bytes(*len)));
        let segment = len.filter(|len| *len >= 2).and_then(|len| rest.get(2..len));
        let segment = segment.ok_or_else(|| error("the data ends within a segment"))?;
        self.at += segment.len() + 2;
        Ok(segment)
    }

    /// All bytes that are left.
    pub fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or(&[])
    }

    pub fn skip(&mut self, len: usize) {
        self.at += len;
    }
}

/// The tables that scans use.
#[derive(Default)]
pub struct Tables {
    /// In the order of the diagonal scan.
    pub quantisation: [Option<[u16; 64]>; 4],
    /// For the first coefficient, and for the others.
    pub huffman: [[Option<HuffmanTable>; 4]; 2],
    /// The units between two restarts, or 0.
    pub restart_interval: usize,
}

impl Tables {
    pub fn read_quantisation(&mut self, mut segment: &[u8]) -> Result<(), ImageError> {
        while let [head, rest @ ..] = segment {
            let (is_wide, index) = (head >> 4 != 0, usize::from(head & 15));
            let len = if is_wide { 128 } else { 64 };
            let (Some(values), Some(table)) = (rest.get(..len), self.quantisation.get_mut(index))
            else {
                return Err(error("a quantisation table is damaged"));
            };
            let value = |place: usize| match is_wide {
                true => u16::from_be_bytes([values[2 * place], values[2 * place + 1]]),
                false => u16::from(values[place]),
            };
            *table = Some(std::array::from_fn(value));
            segment = &rest[len..];
        }
        Ok(())
    }

    pub fn read_huffman(&mut self, mut segment: &[u8]) -> Result<(), ImageError> {
        while let [head, rest @ ..] = segment {
            let table = self.huffman.get_mut(usize::from(head >> 4));
            let table = table.and_then(|tables| tables.get_mut(usize::from(head & 15)));
            let counts = rest.first_chunk::<16>();
            let (Some(table), Some(counts)) = (table, counts) else {
                return Err(error("a Huffman table is damaged"));
            };
            let num_symbols = counts.iter().map(|&count| usize::from(count)).sum();
            let symbols = rest[16..].get(..num_symbols);
            let read = symbols.and_then(|symbols| HuffmanTable::new(counts, symbols));
            *table = Some(read.ok_or_else(|| error("a Huffman table is damaged"))?);
            segment = &rest[16 + num_symbols..];
        }
        Ok(())
    }

    pub fn read_restart_interval(&mut self, segment: &[u8]) -> Result<(), ImageError> {
        let interval = segment.first_chunk();
        let interval = interval.ok_or_else(|| error("the restart interval is damaged"))?;
        self.restart_interval = usize::from(u16::from_be_bytes(*interval));
        Ok(())
    }
}
