//! The tool `bash`: how its result looks in the conversation.

/// Bytes of output that one tool result keeps.
pub const OUTPUT_CAP_BYTES: usize = 10_000;

/// How a command of the tool ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolExit {
    /// With this exit status (128 + signal when a signal ended it, as a shell reports it).
    Code(i32),
    /// The time limit, in seconds, ended it.
    TimedOut(u64),
}

/// The content of a tool result: the combined output without trailing line breaks, the middle left out
/// when it is longer than [`OUTPUT_CAP_BYTES`], then `[exit N]` for a status other than 0. A command
/// without output and with status 0 gives `[no output]`.
pub fn tool_result(output: &[u8], exit: ToolExit) -> String {
    let mut window = OutputWindow::new(OUTPUT_CAP_BYTES);
    window.push(output);
    window.tool_result(exit)
}

/// The first and the last half of a capacity of bytes of a stream of any length.
#[derive(Debug)]
pub struct OutputWindow {
    half: usize,
    head: Vec<u8>,
    tail: Vec<u8>,
    total: u64,
}

impl OutputWindow {
    /// A window that keeps about `cap` bytes.
    pub fn new(cap: usize) -> Self {
        Self {
            half: cap.div_ceil(2),
            head: Vec::new(),
            tail: Vec::new(),
            total: 0,
        }
    }

    /// Takes the next bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let room = self.half - self.head.len();
        let (head, rest) = bytes.split_at(room.min(bytes.len()));
        self.head.extend_from_slice(head);
        self.tail.extend_from_slice(rest);
        // Trimmed at twice the size, so that a byte is moved at most once on average.
        if self.tail.len() > 2 * self.half {
            self.tail.drain(..self.tail.len() - self.half);
        }
    }

    /// Bytes seen.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The kept bytes as text, cut at character borders, with a note in place of the rest.
    pub fn text(&self) -> String {
        let tail = &self.tail[self.tail.len().saturating_sub(self.half)..];
        if self.head.len() + tail.len() == self.total as usize {
            return String::from_utf8_lossy(&[self.head.as_slice(), tail].concat()).into_owned();
        }
        let head = match self.head.iter().rposition(|b| !is_continuation(*b)) {
            Some(start) if std::str::from_utf8(&self.head[start..]).is_err() => &self.head[..start],
            _ => &self.head[..],
        };
        let tail = &tail[tail.iter().take_while(|b| is_continuation(**b)).count()..];
        format!(
            "{}\n[{} bytes left out]\n{}",
            String::from_utf8_lossy(head),
            self.total - (head.len() + tail.len()) as u64,
            String::from_utf8_lossy(tail)
        )
    }

    /// See [`tool_result`].
    pub fn tool_result(&self, exit: ToolExit) -> String {
        let mut text = self.text();
        text.truncate(text.trim_end_matches(['\n', '\r']).len());
        let note = match exit {
            ToolExit::Code(0) if text.is_empty() => "[no output]".to_string(),
            ToolExit::Code(0) => return text,
            ToolExit::Code(code) => format!("[exit {code}]"),
            ToolExit::TimedOut(secs) => format!("[killed after {secs} s]"),
        };
        if !text.is_empty() {
            text.push('\n');
        }
        text + &note
    }
}

fn is_continuation(byte: u8) -> bool {
    byte & 0b1100_0000 == 0b1000_0000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_tell_output_and_status() {
        assert_eq!(tool_result(b"a\nb\n", ToolExit::Code(0)), "a\nb");
        assert_eq!(tool_result(b"", ToolExit::Code(0)), "[no output]");
        assert_eq!(tool_result(b"", ToolExit::Code(3)), "[exit 3]");
        assert_eq!(
            tool_result(b"no such file\n", ToolExit::Code(1)),
            "no such file\n[exit 1]"
        );
        assert_eq!(tool_result(b"x", ToolExit::TimedOut(5)), "x\n[killed after 5 s]");
    }

    #[test]
    fn long_output_keeps_both_ends_and_whole_characters() {
        // A three-byte character straddles every position in turn.
        for shift in 0..3 {
            let text = "x".repeat(shift) + &"€".repeat(10_000);
            let result = tool_result(text.as_bytes(), ToolExit::Code(0));
            assert!(result.len() <= OUTPUT_CAP_BYTES + 40, "{}", result.len());
            assert!(!result.contains('\u{fffd}'));
            assert!(result.contains("bytes left out]"));
            assert!(result.starts_with(&text[..3 + shift]) && result.ends_with("€€"));
        }
    }

    #[test]
    fn a_window_sees_the_same_in_one_piece_or_in_many() {
        let bytes: Vec<u8> = (0..50_000u32).map(|i| b'a' + (i % 26) as u8).collect();
        let mut whole = OutputWindow::new(1000);
        whole.push(&bytes);
        let mut pieces = OutputWindow::new(1000);
        bytes.chunks(37).for_each(|c| pieces.push(c));
        assert_eq!(whole.text(), pieces.text());
        assert_eq!(pieces.total(), 50_000);
        let (head, tail) = (&bytes[..500], &bytes[49_500..]);
        let want = format!(
            "{}\n[49000 bytes left out]\n{}",
            String::from_utf8_lossy(head),
            String::from_utf8_lossy(tail)
        );
        assert_eq!(whole.text(), want);
    }
}
