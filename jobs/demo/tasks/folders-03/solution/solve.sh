#!/bin/bash
set -e
cd /app
mkdir jade harbor lemon
