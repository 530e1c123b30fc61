#!/bin/bash
set -e
cd /app
mv tulip.txt basil.txt
