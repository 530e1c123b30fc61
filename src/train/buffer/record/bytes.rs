//! Little-endian numbers, texts and padded sections, written and read.

pub(super) fn padded(len: usize) -> usize {
    len.next_multiple_of(8)
}

/// Writes numbers, texts and sections.
pub(super) struct Encoder(pub(super) Vec<u8>);

impl Encoder {
    pub(super) fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(super) fn f64(&mut self, value: f64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(super) fn text(&mut self, text: &str) -> Result<(), String> {
        let len = u32::try_from(text.len()).map_err(|_| format!("a text of {} bytes", text.len()))?;
        self.u32(len);
        self.0.extend_from_slice(text.as_bytes());
        Ok(())
    }

    pub(super) fn words(&mut self, words: impl ExactSizeIterator<Item = u32>) {
        let start = self.0.len();
        self.0.resize(start + 4 * words.len(), 0);
        for (out, word) in self.0[start..].chunks_exact_mut(4).zip(words) {
            out.copy_from_slice(&word.to_le_bytes());
        }
    }

    pub(super) fn section(
        &mut self,
        section: u32,
        sequence: u32,
        fill: impl FnOnce(&mut Self) -> Result<(), String>,
    ) -> Result<(), String> {
        self.u32(section);
        self.u32(sequence);
        let at = self.0.len();
        self.0.extend_from_slice(&[0; 8]);
        fill(self)?;
        let len = (self.0.len() - at - 8) as u64;
        self.0[at..at + 8].copy_from_slice(&len.to_le_bytes());
        self.0.resize(padded(self.0.len()), 0);
        Ok(())
    }
}

/// Reads what [`Encoder`] wrote; an error says what was wanted and what is left.
pub(super) struct Decoder<'a>(pub(super) &'a [u8]);

impl<'a> Decoder<'a> {
    pub(super) fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let (head, tail) = self
            .0
            .split_at_checked(len)
            .ok_or_else(|| format!("{len} bytes wanted, {} left", self.0.len()))?;
        self.0 = tail;
        Ok(head)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N)?);
        Ok(bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn f64(&mut self) -> Result<f64, String> {
        Ok(f64::from_le_bytes(self.array()?))
    }

    pub(super) fn text(&mut self) -> Result<String, String> {
        let len = self.u32()? as usize;
        String::from_utf8(self.take(len)?.to_vec()).map_err(|e| e.to_string())
    }

    pub(super) fn words(&self) -> impl ExactSizeIterator<Item = u32> + 'a {
        self.0
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }

    /// The next section's payload, number and sequence.
    pub(super) fn section(&mut self) -> Result<(Decoder<'a>, u32, u32), String> {
        let (section, sequence) = (self.u32()?, self.u32()?);
        let len = usize::try_from(u64::from_le_bytes(self.array()?)).map_err(|e| e.to_string())?;
        let payload = self.take(len)?;
        self.take((padded(len) - len).min(self.0.len()))?;
        Ok((Decoder(payload), section, sequence))
    }
}
